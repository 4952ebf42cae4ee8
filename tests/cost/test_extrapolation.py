"""The interval of an extrapolation contains the true time of known laws, and states its limits."""

import math

import numpy as np
import pytest

from hpctrain.cost.extrapolation import MeasuredSize, Size, extrapolate

LAWS = {
    "ring": lambda p: 1 / p + 0.1 * (p - 1) / p,
    "tree": lambda p: 1 / p + 0.03 * math.log2(p),
    "contention": lambda p: 1 / p + 0.01 * (p - 1),
    "root": lambda p: 1 / p + 0.03 * (math.sqrt(p) - 1),  # not among the models
    "ideal": lambda p: 1 / p,
    "superlinear": lambda p: p**-1.1,
}


def measured(law, sizes, noise, random, repeats=5, nodes=lambda _: 1):
    return [
        MeasuredSize(p, nodes(p), (law(p) * random.lognormal(0, noise, repeats)).tolist())
        for p in sizes
    ]


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize(("sizes", "target"), [((1, 2, 4), 8), ((1, 2, 3), 4), ((1, 2, 4, 8), 16)])
def test_the_interval_contains_the_true_time(name, sizes, target):
    random = np.random.default_rng(7)
    law, num = LAWS[name], 20
    found = [
        extrapolate(measured(law, sizes, 0.03, random), Size(target, 1), "strong")
        for _ in range(num)
    ]
    assert sum(each.low <= law(target) <= each.high for each in found) >= 0.85 * num
    # An interval that excludes nothing is not a prediction.
    assert np.median([each.high / each.low for each in found]) < 2
    assert all(each.low <= each.value <= each.high for each in found)


def test_weak_scaling_has_constant_work():
    random = np.random.default_rng(0)

    def law(p):
        return 0.1 + 0.01 * math.log2(p)

    found = extrapolate(measured(law, (1, 2, 4), 0.01, random), Size(8, 1), "weak")
    assert found.low <= law(8) <= found.high < 1.2 * law(8)


def test_overheads_of_nodes_differ_from_those_of_ranks():
    def law(p):
        return 1 / p + 0.02 * math.log2(-(-p // 4))

    sizes, random = (1, 2, 4, 8, 16), np.random.default_rng(0)
    known = measured(law, sizes, 0.01, random, nodes=lambda p: -(-p // 4))
    found = extrapolate(known, Size(32, 8), "strong")
    assert found.low <= law(32) <= found.high


def test_more_noise_and_a_larger_distance_widen_the_interval():
    def width(noise, target):
        known = measured(LAWS["tree"], (1, 2, 4, 8), noise, np.random.default_rng(3))
        found = extrapolate(known, Size(target, 1), "strong")
        return found.high / found.low

    assert width(0.001, 16) < width(0.05, 16) < width(0.05, 64)


def test_an_error_of_the_validation_widens_the_interval():
    """A jump between the last two sizes, which no model has, is added in both directions."""
    random = np.random.default_rng(0)
    smooth = measured(LAWS["ideal"], (1, 2, 4), 0.001, random)
    jump = [*smooth, MeasuredSize(8, 1, [0.4] * 5)]
    found = extrapolate(jump, Size(16, 1), "strong")
    assert found.high / found.low > 3.0**2  # 0.4 s are 3.2 times the time predicted for 8 ranks


def test_repeats_of_one_are_enough_for_a_value():
    known = [MeasuredSize(p, 1, [LAWS["ring"](p)]) for p in (1, 2, 4)]
    found = extrapolate(known, Size(8, 1), "strong")
    assert found.low <= LAWS["ring"](8) * 1.0001
    assert found.high >= LAWS["ring"](8)
