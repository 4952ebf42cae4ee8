"""Extrapolation of measured step times to more ranks, with a prediction interval.

A model is a power law, or a sum of computing time and of overheads that grow with ranks or nodes;
the coefficients of the sum are not negative. Several models usually fit a few measured sizes
equally well, but differ at larger sizes. This difference is the largest part of the uncertainty,
so the interval contains the predictions of all models that fit.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LEAST_SIZES = 3
"""Minimum number of sizes for an extrapolation: two to fit, and one to test the fit."""

NUM_RESAMPLES = 100
CONFIDENCE = 0.95

_ROUNDING = 1e-6  # relative rounding error of a model that fits exactly

_OVERHEADS: tuple[Callable[[float], float], ...] = (
    lambda n: (n - 1) / n,  # bandwidth of a ring, serial work
    math.log2,  # rounds of a tree
    lambda n: n - 1,  # rounds of a ring, contention
)

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Size:
    """Number of ranks and nodes."""

    ranks: int
    nodes: int


@dataclass(frozen=True)
class MeasuredSize(Size):
    """Step times of the repeats of one size, in seconds."""

    times_s: Sequence[float]


@dataclass(frozen=True)
class Extrapolation:
    """Step time of a size that was not measured, in seconds."""

    value: float
    low: float
    high: float


def extrapolate(
    measured: Sequence[MeasuredSize], target: Size, mode: Literal["strong", "weak"]
) -> Extrapolation:
    """Predict the step time of ``target`` from two or more measured sizes.

    The interval contains the predictions of all models that fit the sizes, and the noise of the
    repeats, which the bootstrap estimates. With ``LEAST_SIZES`` or more sizes, the largest
    measured size is also predicted from the others. If its measured time is outside of that
    predicted interval, the interval of ``target`` is widened by the error. The error is assumed to
    grow with the logarithm of the number of ranks.

    Args:
        measured: sizes with their repeats, by increasing number of ranks.
        target: size to predict, larger than all measured sizes.
        mode: ``strong``: constant work is divided among the ranks; ``weak``: the work of each rank
            is constant.

    Source: Calotoiu et al. 2013, "Using automated performance modeling to find scalability bugs in
    complex codes", for models of few terms; Efron 1979 for the bootstrap.
    """
    found = _of_models(measured, target, mode)
    if len(measured) < LEAST_SIZES:
        return found
    *fewer, last = measured
    tested, actual = _of_models(fewer, last, mode), median(last.times_s)
    error = max(0.0, math.log(actual / tested.high), math.log(tested.low / actual))
    growth = math.log(target.ranks / last.ranks) / math.log(last.ranks / fewer[-1].ranks)
    wider = math.exp(error * max(1.0, growth))
    return Extrapolation(found.value, found.low / wider, found.high * wider)


def _of_models(
    measured: Sequence[MeasuredSize], target: Size, mode: Literal["strong", "weak"]
) -> Extrapolation:
    """Return the range of the predictions of all models that fit the measured sizes."""
    sizes: list[Size] = [*measured, target]
    samples = _samples(measured)
    medians = samples[:, :1]
    noise = np.quantile(np.abs(samples / medians - 1), CONFIDENCE, axis=1).max()
    models = [_power(sizes, samples), *_sums(_terms(sizes, mode), samples)]
    worst = [float(np.abs(each[:-1, :1] / medians - 1).max()) for each in models]
    limit = max(2 * min(worst), float(noise), _ROUNDING)
    found = [each[-1] for each, error in zip(models, worst, strict=True) if error <= limit]
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, [outside, 1 - outside], axis=1)
    values = [float(each[0]) for each in found]
    return Extrapolation(
        median(values), min(*values, float(low.min())), max(*values, float(high.max()))
    )


def _power(sizes: Sequence[Size], samples: Vector) -> Vector:
    """Return the predictions of a power law, which also fits super-linear speed-ups."""
    ranks = np.log([each.ranks for each in sizes])
    slope, start = np.polyfit(ranks[:-1], np.log(samples), 1)
    found: Vector = np.exp(start + np.outer(ranks, slope))
    return found


def _sums(terms: Vector, samples: Vector) -> Iterator[Vector]:
    """Yield the predictions of each sum of the first term and up to two others."""
    num_sizes, num_terms = len(samples), terms.shape[1]
    weights = 1 / samples[:, :1]  # errors are relative
    for number in range(2 if num_sizes < 4 else 3):
        for chosen in combinations(range(1, num_terms), number):
            columns = terms[:, [0, *chosen]]
            yield columns @ _non_negative(columns[:-1] * weights, samples * weights)


def _non_negative(matrix: Vector, targets: Vector) -> Vector:
    """Return the non-negative least-squares solution for each column of ``targets``."""
    best = np.zeros((matrix.shape[1], targets.shape[1]))
    least = np.full(targets.shape[1], np.inf)
    for number in range(1, matrix.shape[1] + 1):
        for subset in map(list, combinations(range(matrix.shape[1]), number)):
            x = np.linalg.lstsq(matrix[:, subset], targets, rcond=None)[0]
            rest = ((matrix[:, subset] @ x - targets) ** 2).sum(axis=0)
            better = (x >= 0).all(axis=0) & (rest < least)
            least[better] = rest[better]
            full = np.zeros_like(best)
            full[subset] = x
            best = np.where(better, full, best)
    return best


def _terms(sizes: Sequence[Size], mode: Literal["strong", "weak"]) -> Vector:
    """Return a row of terms for each size: the computing time first, then the overheads.

    The row contains overheads of nodes only if the measured sizes have different numbers of nodes.
    """
    counts = [[each.ranks for each in sizes]]
    if len({each.nodes for each in sizes[:-1]}) > 1:
        counts.append([each.nodes for each in sizes])
    work = [1 / each.ranks if mode == "strong" else 1.0 for each in sizes]
    overheads = [[term(n) for n in column] for column in counts for term in _OVERHEADS]
    return np.array([work, *overheads]).T


def _samples(measured: Sequence[MeasuredSize]) -> Vector:
    """Return a row for each size: the median of the repeats, then of each bootstrap resample."""
    random = np.random.default_rng(0)
    rows = []
    for each in measured:
        drawn = random.choice(np.array(each.times_s), (NUM_RESAMPLES, len(each.times_s)))
        rows.append([median(each.times_s), *np.median(drawn, axis=1)])
    return np.array(rows)
