"""Statistics of a study: medians and their ratios, with intervals that assume no distribution.

A repeat is one sample: steps of one run are not independent. Intervals are exact for any
continuous distribution, and tell their confidence, also where repeats are too few for 95 %.
Sources: Hoefler and Belli, Scientific Benchmarking of Parallel Computing Systems, SC15; of the
ratio, Mann and Whitney, The Annals of Mathematical Statistics 18 (1947), inverted as by Hodges and
Lehmann, the same 34 (1963).
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from statistics import median as middle

import numpy as np
import numpy.typing as npt

from hpctrain.studies.records import Point, PointRecord, ranks_of

SIZES = ("ranks", "nodes", "ranks_per_node")
"""Factors that say how large the machine is; all others tell curves apart."""

PARTS = ("compute", "communication", "input", "idle")
"""Into which a step is taken apart."""

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value, and the interval that holds the true one with a confidence."""

    value: float
    low: float | None  # None where one sample tells no interval
    high: float | None
    confidence: float  # that of the interval: less than wanted where there are few samples
    num_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PointSummary:
    """What all repeats of one point say together."""

    point: Point
    ranks: int
    oversubscribed: bool
    num_done: int
    num_failed: int
    step_s: Estimate | None  # time of a step: median over repeats of the means of their steps
    samples_per_s: Estimate | None  # median over repeats of all samples by all seconds
    efficiency: Estimate | None  # None where oversubscribed, and without a base
    base: Point | None  # what the efficiency is measured against
    breakdown_s: dict[str, float]
    """Of compute, communication, input and idle the same, where they were told."""


def median(samples: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the median of samples; the ends of its interval are samples, by the sign test."""
    num = len(samples)
    chances = [math.comb(num, below) / 2**num for below in range(num + 1)]
    return _estimate(middle(samples), samples, chances, confidence, num)


def ratio(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE
) -> Estimate:
    """Return the ratio of two medians, second by first, of samples above 0.

    The interval has all factors by which the rank-sum test finds no difference from ``first``.
    """
    value = middle(second) / middle(first)
    ratios = [mine / theirs for mine in second for theirs in first]
    chances = _chances(len(first), len(second))
    return _estimate(value, ratios, chances, confidence, min(len(first), len(second)))


def _estimate(
    value: float,
    candidates: Iterable[float],
    chances: Iterable[float],
    confidence: float,
    num_samples: int,
) -> Estimate:
    """Cut off as many candidates at both ends as the confidence allows.

    ``chances`` are those that none, one, two, ... of the candidates are below the true value.
    """
    ordered, outside = sorted(candidates), 2 * np.cumsum(list(chances))
    cut = max(0, int(np.count_nonzero(outside <= 1 - confidence + 1e-12)) - 1)
    low, high = min(ordered[cut], value), max(ordered[-1 - cut], value)
    kept = 1 - float(outside[cut])
    ends = {"low": low, "high": high} if kept > 0 else {"low": None, "high": None}
    return Estimate(value=value, confidence=max(kept, 0.0), num_samples=num_samples, **ends)


@functools.cache
def _chances(num: int, other: int) -> npt.NDArray[np.float64]:
    """Return the chances of each number of pairs in which the first of two equal samples is less.

    The largest of all is in one sample or in the other, and is more than all of the other.
    """
    if not num or not other:
        return np.ones(1)
    mine = np.pad(_chances(num - 1, other), (other, 0)) * num
    return (mine + np.pad(_chances(num, other - 1), (0, num)) * other) / (num + other)


def step_time_s(record: PointRecord) -> float:
    """Return the time of a step of one repeat: the mean of its steps.

    A median would leave out what comes every few steps, such as the averaging of local SGD.
    """
    return fmean(record.step_s)


def summarize(records: Iterable[PointRecord], mode: str) -> list[PointSummary]:
    """Return a summary of each point, curve by curve, small machines first.

    The base of a curve is its point with the fewest ranks that is not oversubscribed and was
    measured. Points that differ in a factor other than ``SIZES`` are on other curves; in a weak
    study the batch of a rank belongs to the curve, in a strong one the batch of all.
    """
    points: dict[str, list[PointRecord]] = {}
    for record in records:
        points.setdefault(key_of(record.point), []).append(record)
    curves: dict[str, list[list[PointRecord]]] = {}
    for repeats in points.values():
        curves.setdefault(key_of(curve_of(repeats[0].point)), []).append(repeats)
    found = []
    for curve in curves.values():
        curve.sort(key=lambda repeats: ranks_of(repeats[0].point))
        fit = (r for r in curve if any(each.is_done for each in r) and not r[0].oversubscribed)
        base = next(fit, [])
        found += [_summary(repeats, base, mode) for repeats in curve]
    return found


def curve_of(point: Point) -> Point:
    """Return the factors that a point shares with its curve."""
    return {name: value for name, value in point.items() if name not in SIZES}


def key_of(point: Point) -> str:
    """Return the same text for the same point."""
    return repr(sorted(point.items()))


def _summary(
    repeats: Sequence[PointRecord], base: Sequence[PointRecord], mode: str
) -> PointSummary:
    point, ranks = repeats[0].point, ranks_of(repeats[0].point)
    done = [each for each in repeats if each.is_done]
    times = [step_time_s(each) for each in done]
    oversubscribed = any(each.oversubscribed for each in repeats)
    efficiency = None
    if base and times and not oversubscribed:
        growth = ranks / ranks_of(base[0].point) if mode == "strong" else 1
        efficiency = ratio(times, [step_time_s(each) / growth for each in base if each.is_done])
        if repeats is base:  # by definition, not by measurement
            efficiency = replace(efficiency, low=1.0, high=1.0, confidence=1.0)
    rates = [each.samples_per_s for each in done if each.samples]
    parts = {name: [s for each in done if (s := getattr(each, f"{name}_s"))] for name in PARTS}
    return PointSummary(
        point=point,
        ranks=ranks,
        oversubscribed=oversubscribed,
        num_done=len(done),
        num_failed=len(repeats) - len(done),
        step_s=median(times) if times else None,
        samples_per_s=median(rates) if rates else None,
        efficiency=efficiency,
        base=base[0].point if base else None,
        breakdown_s={name: middle(map(fmean, told)) for name, told in parts.items() if told},
    )
