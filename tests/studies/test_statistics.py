"""Statistics of a study, compared with closed forms and with properties of random samples."""

from itertools import combinations

import numpy as np
import pytest

from hpctrain.studies.statistics import median, ratio
from hpctrain.studies.study_results import summarize
from tests.studies.test_records import record

DRAWS = 500


def repeats(ranks: int, step_s: list[float], **values):
    return [
        record(
            100 * ranks + repeat, repeat=repeat, point={"ranks": ranks, "batch": 8},
            step_s=[1.75 * each, each / 2, 0.75 * each], samples=24, seconds=3 * each, **values,
        )
        for repeat, each in enumerate(step_s)
    ]  # fmt: skip


def noise(kind, generator, shape):
    """Return random times with median 1."""
    if kind == "heavy":
        return 1 + 0.02 * (generator.pareto(1.2, shape) - (2 ** (1 / 1.2) - 1))
    if kind == "outliers":  # every tenth repeat is slowed down by another job
        slow = np.where(generator.random(shape) < 0.1, 2.0, 1.0)
        return slow * np.exp(generator.normal(0, 0.02, shape)) / 1.0028
    times = np.exp(generator.normal(0, 0.02, shape))
    drift = np.linspace(-0.1, 0.1, shape[-1]) if kind == "drift" else 0
    return times * (1 + drift)


def held(found, truth):
    """Return the observed coverage of the intervals, and its lower limit at their confidence."""
    share = np.mean([each.low <= truth <= each.high for each in found])
    return share, found[0].confidence - 2.5 * np.sqrt(0.05 / len(found))


@pytest.mark.parametrize("kind", ["even", "heavy", "outliers", "drift"])
@pytest.mark.parametrize("num", [3, 5, 12])
def test_intervals_cover_the_truth_at_their_confidence_for_any_noise(kind, num):
    generator = np.random.default_rng([num, len(kind)])
    one, other = (noise(kind, generator, (DRAWS, num)) for _ in range(2))
    share, least = held([median(each) for each in one.tolist()], 1)
    assert share >= least
    times = zip(one.tolist(), (1.1 * other).tolist(), strict=True)
    share, least = held([ratio(*both) for both in times], 1.1)
    assert share >= least


def test_the_confidence_follows_from_the_number_of_repeats():
    output = [median(list(range(num))).confidence for num in range(1, 8)]
    assert output == [0, 0.5, 0.75, 0.875, 0.9375, 0.96875, 0.984375]
    assert median([3.0]).low is median([3.0]).high is None
    assert ratio([3.0], [4.0]).low is None
    assert ratio([1.0] * 3, [2.0] * 3).confidence == pytest.approx(0.9)
    assert ratio([1.0] * 5, [2.0] * 5).confidence == pytest.approx(1 - 8 / 252)


@pytest.mark.parametrize(("num", "other"), [(1, 4), (3, 3), (4, 2), (5, 5)])
def test_the_interval_of_a_ratio_follows_from_all_rank_orders(num, other):
    places = range(num + other)
    less = [
        sum(b < a for a in mine for b in places if b not in mine)
        for mine in combinations(places, num)
    ]
    first, second = (np.exp(np.random.default_rng(1).normal(size=n)) for n in (num, other))
    found = ratio(first.tolist(), second.tolist(), confidence=0.8)
    ratios = np.sort(np.divide.outer(second, first), axis=None)
    inside = [k for k in range(len(ratios)) if 1 - 2 * np.mean(np.array(less) <= k) >= 0.8 - 1e-12]
    cut = max([0, *inside])
    assert (found.low, found.high) == (ratios[cut], ratios[-1 - cut])
    assert found.confidence == pytest.approx(1 - 2 * np.mean(np.array(less) <= cut))


def test_the_median_and_its_interval_equal_order_statistics():
    values = np.random.default_rng(7).lognormal(size=5).tolist()
    found = median(values)
    assert (found.low, found.value, found.high) == (min(values), np.median(values), max(values))
    found = median(list(range(20)))
    assert (found.low, found.high) == (5, 14)  # from tables of the sign test


def test_efficiency_is_one_for_perfect_scaling_and_follows_the_formula():
    def found(base_s, step_s, ranks, mode):
        records = [*repeats(1, base_s), *repeats(ranks, step_s)]
        return summarize(records, mode)[1].efficiency

    base = [8.0, 8.0, 8.0]
    assert found(base, [2.0] * 3, 4, "strong").value == 1
    assert found(base, [2.0] * 3, 8, "strong").value == 0.5  # T1 / (p Tp)
    assert found(base, [10.0] * 3, 8, "weak").value == 0.8  # T1 / Tp
    noisy = found([7.0, 8.0, 9.0], [1.8, 2.0, 2.2], 4, "strong")
    assert noisy.low <= 1 <= noisy.high
    # the base has only one repeat
    assert found([8.0], [2.0, 3.0, 4.0], 2, "strong").confidence == 0.5


def test_efficiency_is_relative_to_the_smallest_point_and_none_if_oversubscribed():
    records = [
        *repeats(1, [8.0, 7.0, 9.0]),
        *repeats(2, [4.0, 5.0, 6.0]),
        *repeats(4, [1.0, 1.0, 1.0], oversubscribed=True),
    ]
    one, two, four = summarize(reversed(records), "strong")
    assert (one.ranks, two.ranks, four.ranks) == (1, 2, 4)
    assert (one.efficiency.low, one.efficiency.value, one.efficiency.high) == (1, 1, 1)
    assert two.efficiency.value == pytest.approx(0.8)
    assert two.base.point == one.point
    assert two.samples_per_s.value == pytest.approx(24 / 15)
    assert four.efficiency is None
    assert four.step_s.value == 1


def test_efficiency_is_none_without_a_base_that_is_not_oversubscribed():
    alone = [*repeats(2, [4.0], oversubscribed=True), *repeats(4, [1.0], oversubscribed=True)]
    assert [each.efficiency for each in summarize(alone, "strong")] == [None, None]
    failed = record(9, point={"ranks": 1, "batch": 8}, status="failed", step_s=[])
    one, two, four = summarize([failed, *repeats(2, [4.0]), *repeats(4, [1.0])], "strong")
    assert one.efficiency is None
    # relative to the smallest measured point
    assert (two.efficiency.value, four.efficiency.value) == (1, 2)


@pytest.mark.parametrize("step_s", [[], [0.0], [None], [0.5, float("nan")]])
def test_failed_repeats_and_invalid_durations_are_counted_but_not_measured(step_s):
    status = "done" if step_s else "failed"
    bad = record(9, point={"ranks": 2, "batch": 8}, status=status, step_s=step_s)
    one, two = summarize([*repeats(1, [8.0, 8.0]), bad], "strong")
    assert (len(one.done), len(one.records)) == (2, 2)
    assert (len(two.done), len(two.records)) == (0, 1)
    assert two.step_s is two.efficiency is two.samples_per_s is None
