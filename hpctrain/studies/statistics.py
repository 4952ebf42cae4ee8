"""Statistics of a study: medians and rates with intervals, efficiency, two studies compared.

A repeat is one sample: steps of one run are not independent. Intervals are percentiles of a seeded
bootstrap over repeats, of few repeats too narrow rather than too wide. Sources: Hoefler and Belli,
Scientific Benchmarking of Parallel Computing Systems, SC15; Efron, The Annals of Statistics 7
(1979).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.core.errors import DataError
from hpctrain.studies.records import Point, PointRecord, StudyFacts, ranks_of

SIZES = ("ranks", "nodes", "ranks_per_node")
"""Factors that say how large the machine is; all others tell curves apart."""

_RESAMPLES = 4000

_Array = npt.NDArray[np.float64]
_Statistic = Callable[[_Array], _Array]  # of samples along the last axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value and the interval that holds it with a confidence."""

    value: float
    low: float | None  # None where one sample tells no interval
    high: float | None
    confidence: float
    num_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PointSummary:
    """What all repeats of one point say together."""

    point: Point
    ranks: int
    oversubscribed: bool
    num_done: int
    num_failed: int
    errors: list[str]  # of those that failed
    step_s: Estimate | None  # time of a step: median over repeats of the means of their steps
    samples_per_s: Estimate | None  # harmonic mean over repeats
    efficiency: Estimate | None  # None where oversubscribed, and without a base
    base: Point | None  # what the efficiency is measured against
    breakdown_s: dict[str, float]
    """Of compute, communication, input and idle the same, where they were told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The time of a step of the same point in two studies."""

    point: Point
    ratio: Estimate  # of the second study to the first; its confidence is 1 - alpha
    alpha: float
    """How often two studies that do not differ are called different, at this point alone."""

    @property
    def is_different(self) -> bool:
        """Whether the interval leaves out 1."""
        low, high = self.ratio.low, self.ratio.high
        return low is not None and high is not None and not low <= 1 <= high


def median(values: Sequence[float], *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Return the median of samples with its interval."""
    return _bootstrap([values], lambda each: np.median(each, -1), confidence, seed)


def harmonic_mean(rates: Sequence[float], *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Return the harmonic mean of rates, each above 0, with its interval.

    It is the rate of all work together where each sample has done the same.
    """
    return _bootstrap([rates], lambda each: 1 / np.mean(1 / each, -1), confidence, seed)


def step_time_s(record: PointRecord) -> float:
    """Return the time of a step of one repeat: the mean of its steps.

    A median would leave out what comes every few steps, such as the averaging of local SGD.
    """
    return fmean(record.step_s)


def efficiency(
    base_s: Sequence[float],
    step_s: Sequence[float],
    *,
    growth: float,
    mode: str,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Return how well ``growth`` times the ranks of a base are used.

    Args:
        base_s: time of a step in each repeat of the base.
        step_s: the same at the point.
        growth: ranks of the point by those of the base.
        mode: ``strong``: T1 / (p Tp), of the same work; ``weak``: T1 / Tp, of p times the work.
        confidence: of the interval.
        seed: of the bootstrap.
    """
    ideal_s = [each / (growth if mode == "strong" else 1.0) for each in base_s]
    return _bootstrap([ideal_s, step_s], lambda each: np.median(each, -1), confidence, seed)


def summarize(
    records: Iterable[PointRecord], facts: StudyFacts, *, confidence: float = 0.95
) -> list[PointSummary]:
    """Return a summary of each point, curve by curve, small machines first.

    The base of a curve is its point with the fewest ranks that is not oversubscribed and was
    measured. Points that differ in a factor other than ``SIZES`` are on other curves; in a weak
    study the batch of a rank belongs to the curve, in a strong one the batch of all.
    """
    points: dict[str, list[PointRecord]] = {}
    for record in records:
        points.setdefault(_key(record.point), []).append(record)
    curves: dict[str, list[list[PointRecord]]] = {}
    for repeats in points.values():
        curves.setdefault(_key(curve_of(repeats[0].point)), []).append(repeats)
    found = []
    for curve in curves.values():
        curve.sort(key=lambda repeats: ranks_of(repeats[0].point))
        fit = (r for r in curve if _times(r) and not r[0].oversubscribed)
        base = next(fit, None)
        found += [_summary(repeats, base, facts, confidence) for repeats in curve]
    return found


def curve_of(point: Point) -> Point:
    """Return the factors that a point shares with its curve."""
    return {name: value for name, value in point.items() if name not in SIZES}


def compare(
    first: Iterable[PointRecord], second: Iterable[PointRecord], *, alpha: float, seed: int = 0
) -> list[Comparison]:
    """Compare two studies at each point that both have measured, by a paired bootstrap.

    Repeats of the same number are a pair; pairs are drawn together. All points together call
    studies different that are not with a probability of at most ``alpha``: each has its share
    of it (Bonferroni).

    Raises ``DataError``: no point is in both.
    """
    mine, theirs = _by_point(first), _by_point(second)
    shared = {
        key: (point, sorted(times.keys() & theirs[key][1].keys()))
        for key, (point, times) in mine.items()
        if key in theirs and times.keys() & theirs[key][1].keys()
    }
    if not shared:
        raise DataError(
            "two studies are compared at the points that both have measured, and these share none"
        )
    found, share = [], alpha / len(shared)
    for key, (point, repeats) in shared.items():
        pairs = [[each[key][1][repeat] for repeat in repeats] for each in (mine, theirs)]
        ratio = paired_ratio(*pairs, alpha=share, seed=seed)
        found.append(Comparison(point=point, ratio=ratio, alpha=share))
    return found


def _by_point(records: Iterable[PointRecord]) -> dict[str, tuple[Point, dict[int, float]]]:
    """Return each point and the time of a step in each of its repeats."""
    found: dict[str, tuple[Point, dict[int, float]]] = {}
    for record in records:
        if record.status == "done":
            _, times = found.setdefault(_key(record.point), (record.point, {}))
            times[record.repeat] = step_time_s(record)
    return found


def paired_ratio(
    first: Sequence[float], second: Sequence[float], *, alpha: float, seed: int = 0
) -> Estimate:
    """Return the ratio of the medians, second by first, of samples that are pairs."""
    pairs = np.asarray([first, second], dtype=np.float64)
    value = float(np.median(pairs[1]) / np.median(pairs[0]))
    drawn = pairs[:, _indices(pairs.shape[1], np.random.default_rng(seed))]
    medians = np.median(drawn, -1)
    return _estimate(value, medians[1] / medians[0], 1 - alpha, pairs.shape[1])


def _summary(
    repeats: Sequence[PointRecord],
    base: Sequence[PointRecord] | None,
    facts: StudyFacts,
    confidence: float,
) -> PointSummary:
    how: dict[str, Any] = {"confidence": confidence, "seed": facts.seed}
    done = [each for each in repeats if each.status == "done"]
    times, ranks = _times(repeats), ranks_of(repeats[0].point)
    oversubscribed = any(each.oversubscribed for each in repeats)
    found = None
    if base is not None and times and not oversubscribed:
        growth = ranks / ranks_of(base[0].point)
        found = efficiency(_times(base), times, growth=growth, mode=facts.mode, **how)
        if repeats is base:  # by definition, not by measurement
            found = replace(found, low=1.0, high=1.0)
    rates = [each.samples_per_s for each in done if each.samples and each.seconds]
    return PointSummary(
        point=repeats[0].point,
        ranks=ranks,
        oversubscribed=oversubscribed,
        num_done=len(done),
        num_failed=len(repeats) - len(done),
        errors=[each.error or "" for each in repeats if each.status == "failed"],
        step_s=median(times, **how) if times else None,
        samples_per_s=harmonic_mean(rates, **how) if rates else None,
        efficiency=found,
        base=None if base is None else base[0].point,
        breakdown_s=_breakdown(done),
    )


def _breakdown(done: Sequence[PointRecord]) -> dict[str, float]:
    found = {}
    for part in ("compute", "communication", "input", "idle"):
        told = [steps for each in done if (steps := getattr(each, f"{part}_s"))]
        if told:
            found[part] = float(np.median([fmean(steps) for steps in told]))
    return found


def _times(repeats: Iterable[PointRecord]) -> list[float]:
    return [step_time_s(each) for each in repeats if each.status == "done" and each.step_s]


def _key(point: Point) -> str:
    return repr(sorted(point.items()))


def _bootstrap(
    samples: Sequence[Sequence[float]], statistic: _Statistic, confidence: float, seed: int
) -> Estimate:
    """Estimate a statistic of one list of samples, or its ratio between two, first by second."""
    generator = np.random.default_rng(seed)
    values, drawn = [], []
    for each in samples:
        array = np.asarray(each, dtype=np.float64)
        values.append(float(statistic(array)))
        drawn.append(statistic(array[_indices(len(array), generator)]))
    if len(samples) == 1:
        return _estimate(values[0], drawn[0], confidence, len(samples[0]))
    smallest = min(map(len, samples))
    return _estimate(values[0] / values[1], drawn[0] / drawn[1], confidence, smallest)


def _indices(num_samples: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    return generator.integers(num_samples, size=(_RESAMPLES, num_samples))


def _estimate(value: float, drawn: _Array, confidence: float, num_samples: int) -> Estimate:
    low = high = None
    if num_samples > 1:
        tail = (1 - confidence) / 2
        low, high = map(float, np.quantile(drawn, (tail, 1 - tail)))
    return Estimate(
        value=value, low=low, high=high, confidence=confidence, num_samples=num_samples
    )
