"""Check that measurements change the default table of algorithms only if the gain is clear."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.plan.choice import (
    BATCHING_SIZES,
    CHUNKS,
    DEFAULT,
    GAIN,
    LATENCY_SHARE,
    SIZES,
    SMALL_BYTES,
    batching,
    best_chunk,
    candidates,
    chunk_sizes,
    expected_s,
    faster,
    refine,
)
from hpctrain.comm.plan.plan import Measurement, SizeTable
from hpctrain.core.units import KIB, MIB
from tests.comm.test_plan import plan_for

RULE = SizeTable(((0, "doubling"), (32 * KIB, "halving"), (256 * KIB, "ring")))
RAIL_SIZES = SIZES["rail"]


def figures(num_bytes, **seconds):
    """Return measurements in which all runs are equal."""
    return [Measurement("rail", num_bytes, name, (value,) * 3) for name, value in seconds.items()]


@pytest.mark.parametrize(
    ("measured", "winner"),
    [
        ({"rule": (1.0, 1.0), "other": (0.8, 0.8)}, "other"),
        ({"rule": (1.0, 1.0), "other": (0.9, 0.9)}, "rule"),  # the gain is not clear
        ({"rule": (1.0, 1.0), "other": (2.0, 2.0)}, "rule"),
        ({"rule": (1.0, 1.0), "b": (1 - GAIN, 1 - GAIN)}, "b"),  # the smallest gain that counts
        ({"rule": (1.0,), "b": (0.5, 0.5), "a": (0.5, 0.5)}, "b"),  # the first of equals
        ({"other": (0.1, 0.1)}, "rule"),  # it was not measured
        ({"rule": (1.0, 5.0, 6.0), "other": (0.1, 0.1, 1.1)}, "rule"),  # one run disagrees: noise
        ({"rule": (1.0, 5.0, 6.0), "other": (0.1,)}, "rule"),
        # A steady algorithm wins over the fastest one.
        ({"rule": (1.0, 1.0), "a": (0.1, 0.1, 2.0), "b": (0.5, 0.6, 0.7)}, "b"),
    ],
)
def test_rule_is_kept_unless_another_algorithm_is_faster_in_each_run(measured, winner):
    runs = {name: Measurement("rail", 1, name, values) for name, values in measured.items()}
    assert faster(runs, "rule") == winner


@pytest.mark.parametrize(
    ("measured", "steps"),
    [
        ([], RULE.steps),
        (  # measurements that confirm the rule change nothing
            [*figures(4 * KIB, doubling=1.0, ring=2.0), *figures(MIB, ring=1.0, halving=2.0)],
            RULE.steps,
        ),
        (  # not measured at 64 KiB, so the rule stays up to its own limit
            figures(64 * KIB, halving=1.0, library=0.5),
            ((0, "doubling"), (32 * KIB, "library"), (256 * KIB, "ring")),
        ),
        (  # the largest size decides for all above
            figures(MIB, ring=1.0, library=0.5),
            (*RULE.steps[:2], (256 * KIB, "library")),
        ),
        (  # sizes that were not reached keep the rule
            figures(4 * KIB, doubling=1.0, library=0.1),
            ((0, "library"), (16 * KIB, "doubling"), *RULE.steps[1:]),
        ),
    ],
)
def test_measured_size_decides_for_neighbouring_sizes(measured, steps):
    assert refine(RULE, measured, RAIL_SIZES).steps == steps


@pytest.mark.parametrize("what", SIZES)
@pytest.mark.parametrize("plan", [plan_for(4), plan_for(4, per_node=2)])
def test_the_plans_own_algorithm_is_measured_first(what, plan):
    for size in SIZES[what]:
        names = candidates(what, size, plan)
        assert names[0] == plan.table(what).at(size)
        is_small = (what == "rail" or plan.num_rails) and size < SMALL_BYTES
        assert len(set(names)) == len(names)
        assert (len(names) == 1) == is_small  # tensors sent with a vote have one order of sums


def test_duration_of_a_size_is_estimated_linearly():
    assert expected_s({}, 100) == 0
    assert expected_s({10: 2.0}, 100) == 2
    assert expected_s({10: 2.0, 20: 3.0}, 100) == pytest.approx(11)
    assert expected_s({10: 3.0, 20: 2.0}, 100) == 2


A_GBIT = 1e9 / 8  # bytes per second


def times(latency_s, bytes_per_s, sizes=BATCHING_SIZES):
    return {size: latency_s + (size - BATCHING_SIZES[0]) / bytes_per_s for size in sizes}


@given(st.floats(2e-6, 8e-3), st.floats(1e6, 1e11))
def test_latency_is_a_small_share_of_a_full_message_and_at_least_a_cycle(latency_s, bytes_per_s):
    chosen = batching(times(latency_s, bytes_per_s))
    assert 1 / 4.1 <= chosen.cycle_s / latency_s <= 1.05
    if 64 * KIB < chosen.fusion_bytes < 64 * MIB:
        share = latency_s * bytes_per_s / chosen.fusion_bytes
        assert LATENCY_SHARE / 2.1 <= share <= LATENCY_SHARE * 2.1
    for figure in (chosen.fusion_bytes, chosen.cycle_s / 1e-6):  # powers of four
        assert math.log(figure, 4) == pytest.approx(round(math.log(figure, 4)), abs=1e-6)


@given(st.floats(0.1e-3, 1e-3))
def test_links_of_200_mbit_and_1_gbit_have_different_fusion_sizes(latency_s):
    slow, fast = batching(times(latency_s, A_GBIT / 5)), batching(times(latency_s, A_GBIT))
    assert slow.fusion_bytes < fast.fusion_bytes


@pytest.mark.parametrize(
    ("bytes_per_s", "is_cut"), [(A_GBIT / 5, True), (A_GBIT, True), (10 * A_GBIT, False)]
)
def test_parts_are_split_into_chunks_where_the_link_is_the_limit(bytes_per_s, is_cut):
    assert bool(chunk_sizes(times(1e-3, bytes_per_s))) == is_cut
    assert chunk_sizes(times(1e-3, A_GBIT / 100)) == CHUNKS[-1:]  # it takes too long to measure


def test_chunks_are_small_where_that_is_faster_in_each_run():
    large, small = CHUNKS
    assert best_chunk({large: [84.0, 83.0, 85.0], small: [73.0, 72.0, 82.0]}) == small
    assert best_chunk({large: [84.0, 83.0, 85.0], small: [73.0, 72.0, 84.0]}) == large
    assert best_chunk({large: [84.0, 83.0, 85.0], small: [82.0, 82.0, 82.0]}) == large


@pytest.mark.parametrize(
    "seconds",
    [
        {},
        times(1e-3, 1e8, BATCHING_SIZES[:1]),
        times(1e-3, -1e9),
        dict.fromkeys(BATCHING_SIZES, 1e-3),
    ],
)
def test_uninformative_measurements_change_nothing(seconds):
    assert batching(seconds) == DEFAULT
    assert chunk_sizes(seconds) == ()
