"""How many small operations travel as one follows from what all-reduces took."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.plan.choice import BATCHING_SIZES, DEFAULT, LATENCY_SHARE, batching
from hpctrain.core.units import KIB, MIB

A_GBIT = 1e9 / 8
"""Bytes per second."""


def times(latency_s, bytes_per_s, sizes=BATCHING_SIZES):
    return {size: latency_s + (size - BATCHING_SIZES[0]) / bytes_per_s for size in sizes}


@given(st.floats(2e-6, 8e-3), st.floats(1e6, 1e11))
def test_latency_is_a_small_share_of_a_full_message_and_no_shorter_than_a_cycle(
    latency_s, bytes_per_s
):
    chosen = batching(times(latency_s, bytes_per_s))
    assert 1 / 4.1 <= chosen.cycle_s / latency_s <= 1.05
    if 64 * KIB < chosen.fusion_bytes < 64 * MIB:
        share = latency_s * bytes_per_s / chosen.fusion_bytes
        assert LATENCY_SHARE / 2.1 <= share <= LATENCY_SHARE * 2.1


@given(st.floats(2e-6, 8e-3), st.floats(1e6, 1e11))
def test_both_are_powers_of_four(latency_s, bytes_per_s):
    chosen = batching(times(latency_s, bytes_per_s))
    assert math.log(chosen.fusion_bytes, 4) == pytest.approx(
        round(math.log(chosen.fusion_bytes, 4))
    )
    in_us = chosen.cycle_s / 1e-6
    assert math.log(in_us, 4) == pytest.approx(round(math.log(in_us, 4)), abs=1e-6)


@given(st.floats(0.1e-3, 1e-3))
def test_a_link_of_200_mbit_and_one_of_a_gbit_are_served_differently(latency_s):
    slow, fast = batching(times(latency_s, A_GBIT / 5)), batching(times(latency_s, A_GBIT))
    assert slow.fusion_bytes < fast.fusion_bytes


@pytest.mark.parametrize(
    "seconds",
    [
        {},
        times(1e-3, 1e8, BATCHING_SIZES[:1]),
        times(1e-3, -1e9),
        dict.fromkeys(BATCHING_SIZES, 1e-3),
    ],
)
def test_what_says_nothing_about_the_link_changes_nothing(seconds):
    assert batching(seconds) == DEFAULT
