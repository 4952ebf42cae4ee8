"""Medians and ratios of medians, with confidence intervals that assume no distribution.

A repeat is one sample, because the steps of a run are not independent. Intervals are exact for any
continuous distribution. Each interval states its confidence, which is below 95 % with few repeats.
Sources: Hoefler and Belli, Scientific Benchmarking of Parallel Computing Systems, SC15; for
ratios, Mann and Whitney, The Annals of Mathematical Statistics 18 (1947), inverted as by Hodges
and Lehmann, The Annals of Mathematical Statistics 34 (1963).
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from statistics import median as middle

import numpy as np
import numpy.typing as npt

from hpctrain.report.figure import CONFIDENCE, Estimate


def median(samples: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the median of samples, with the confidence interval of the sign test."""
    num = len(samples)
    chances = [math.comb(num, below) / 2**num for below in range(num + 1)]
    return _estimate(middle(samples), samples, chances, confidence)


def ratio(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE
) -> Estimate:
    """Return the median of ``second`` divided by that of ``first``; all samples must be positive.

    The interval contains each factor f for which the rank-sum test finds no difference between
    ``second`` and the samples of ``first`` multiplied by f.
    """
    value = middle(second) / middle(first)
    ratios = [mine / theirs for mine in second for theirs in first]
    chances = _chances(len(first), len(second))
    return _estimate(value, ratios, chances, confidence)


def repeats_needed(confidence: float) -> int:
    """Return how many repeats each of two studies needs so that a ratio has this confidence."""
    ones = ([1.0] * num for num in itertools.count(2))
    return next(len(one) for one in ones if not ratio(one, one, confidence).falls_short)


def _estimate(
    value: float, candidates: Iterable[float], chances: Iterable[float], confidence: float
) -> Estimate:
    """Return the estimate ``value`` with an interval of the requested confidence.

    The bounds of the interval are two of the sorted ``candidates``. Equally many candidates are
    below and above the interval, as many as the confidence allows. ``chances[k]`` is the
    probability that exactly k candidates are below the true value.
    """
    ordered, outside = sorted(candidates), 2 * np.cumsum(list(chances))
    cut = max(0, int(np.count_nonzero(outside <= 1 - confidence + 1e-12)) - 1)
    low, high = min(ordered[cut], value), max(ordered[-1 - cut], value)
    kept = 1 - float(outside[cut])
    ends = {"low": low, "high": high} if kept > 0 else {"low": None, "high": None}
    return Estimate(value=value, confidence=max(kept, 0.0), wanted=confidence, **ends)


@functools.cache
def _chances(num: int, other: int) -> npt.NDArray[np.float64]:
    """Return the null distribution of the Mann-Whitney statistic.

    The first sample has ``num`` values, the second has ``other`` values. Entry k is the
    probability that k of the ``num * other`` pairs have the larger value in the first sample. Each
    step of the recursion removes the largest value, which belongs to one of the two samples.
    """
    if not num or not other:
        return np.ones(1)
    mine = np.pad(_chances(num - 1, other), (other, 0)) * num
    return (mine + np.pad(_chances(num, other - 1), (0, num)) * other) / (num + other)
