"""Statistics of a study against closed forms, and against what is known of random samples."""

import numpy as np
import pytest

from hpctrain.core.errors import DataError
from hpctrain.studies.statistics import (
    compare,
    efficiency,
    harmonic_mean,
    median,
    paired_ratio,
    summarize,
)
from tests.studies.test_records import FACTS, record

GENERATOR = np.random.default_rng(7)


def repeats(ranks: int, step_s: list[float], **values):
    return [
        record(
            100 * ranks + repeat, repeat=repeat, point={"ranks": ranks, "batch": 8},
            step_s=[1.75 * each, each / 2, 0.75 * each], samples=24, seconds=3 * each, **values,
        )
        for repeat, each in enumerate(step_s)
    ]  # fmt: skip


def test_the_median_and_its_interval_are_those_of_the_samples():
    values = GENERATOR.lognormal(size=5).tolist()
    found = median(values)
    assert found.value == np.median(values)
    assert min(values) <= found.low <= found.value <= found.high <= max(values)
    assert found == median(values)  # the same seed, the same bits
    assert median([3.0]).low is None


def test_the_interval_holds_the_true_median_about_as_often_as_it_says():
    samples = GENERATOR.normal(10, 1, size=(200, 30))
    found = [median(each.tolist(), confidence=0.9) for each in samples]
    held = sum(each.low <= 10 <= each.high for each in found)
    assert 165 <= held <= 195


def test_the_mean_of_rates_is_all_work_by_all_time():
    seconds = np.array([1.0, 2.0, 5.0])
    assert harmonic_mean((12 / seconds).tolist()).value == pytest.approx(36 / seconds.sum())


def test_efficiency_is_one_for_perfect_scaling_and_that_of_the_formula_else():
    base, times = [8.0, 8.0, 8.0], [2.0, 2.0, 2.0]
    assert efficiency(base, times, growth=4, mode="strong").value == 1
    assert efficiency(base, times, growth=8, mode="strong").value == 0.5  # T1 / (p Tp)
    assert efficiency(base, [10.0] * 3, growth=8, mode="weak").value == 0.8  # T1 / Tp
    found = efficiency([7.0, 8.0, 9.0], [1.8, 2.0, 2.2], growth=4, mode="strong")
    assert found.low <= 1 <= found.high


def test_a_point_is_measured_against_the_smallest_of_its_curve_never_if_oversubscribed():
    records = [
        *repeats(1, [8.0, 7.0, 9.0]),
        *repeats(2, [4.0, 5.0, 6.0]),
        *repeats(4, [1.0, 1.0, 1.0], oversubscribed=True),
    ]
    one, two, four = summarize(reversed(records), FACTS)
    assert (one.ranks, two.ranks, four.ranks) == (1, 2, 4)
    assert (one.efficiency.low, one.efficiency.value, one.efficiency.high) == (1, 1, 1)
    assert two.efficiency.value == pytest.approx(0.8)
    assert two.base == one.point
    assert two.samples_per_s.value == pytest.approx(3 * 24 / 45)
    assert four.efficiency is None
    assert four.step_s.value == 1


def test_failed_repeats_are_counted_and_told_and_measure_nothing():
    failed = record(9, point={"ranks": 2, "batch": 8}, status="failed", error="killed", step_s=[])
    one, two = summarize([*repeats(1, [8.0, 8.0]), failed], FACTS)
    assert (one.num_done, one.num_failed) == (2, 0)
    assert (two.num_done, two.num_failed, two.errors) == (0, 1, ["killed"])
    assert two.step_s is two.efficiency is two.samples_per_s is None


def test_pairs_take_out_what_both_studies_share_and_equal_studies_do_not_differ():
    noise = GENERATOR.lognormal(0, 0.5, size=5)
    found = paired_ratio(noise.tolist(), (noise * 1.1).tolist(), alpha=0.05)
    assert found.low == pytest.approx(1.1)
    assert found.high == pytest.approx(1.1)
    [same] = compare(repeats(2, noise.tolist()), repeats(2, noise.tolist()), alpha=0.05)
    assert not same.is_different
    [slower] = compare(repeats(2, noise.tolist()), repeats(2, (1.1 * noise).tolist()), alpha=0.05)
    assert slower.is_different
    assert slower.ratio.value == pytest.approx(1.1)


def test_points_share_the_chance_of_a_wrong_verdict_and_only_shared_ones_are_compared():
    both = [*repeats(1, [1.0, 2.0]), *repeats(2, [1.0, 2.0])]
    found = compare(both, [*both, *repeats(4, [1.0])], alpha=0.05)
    assert [(each.point["ranks"], each.alpha) for each in found] == [(1, 0.025), (2, 0.025)]
    with pytest.raises(DataError, match="share none"):
        compare(repeats(1, [1.0]), repeats(2, [1.0]), alpha=0.05)
