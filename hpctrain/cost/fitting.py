"""A machine's figures from measured sums: a non-negative fit in which no outlier counts much."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.atomic import publishing
from hpctrain.core.checks import CheckedFields, Count, Number, Positive
from hpctrain.core.errors import ConfigError
from hpctrain.cost.collectives import Load, Way, allreduce
from hpctrain.cost.machine import Link, Machine

Vector = NDArray[np.float64]

LEAST_POINTS = 4
"""Fewer say nothing about five figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(CheckedFields):
    """One measured sum over all ranks; ``ConfigError`` where a rule is broken."""

    nodes: Number
    ranks_per_node: Number
    nics: Number = 1  # network cards of each node
    algorithm: str
    """As a plan names it: ``slices`` or ``direct`` on one node, else that of the rails, or of all
    ranks where there is no rail."""
    rails: Count  # 0 where the algorithm runs flat over all ranks
    codec: str = "none"
    ranks_per_core: Positive = 1.0
    """How many ranks take turns on a core: what a processor does takes as many times as long."""
    num_bytes: Number  # of the message, before the codec
    seconds: Positive  # of the slowest rank

    @property
    def way(self) -> Way:
        """How the ranks summed; ``ConfigError`` if no model knows it."""
        return Way(self.algorithm, self.rails, self.codec)

    @property
    def shape(self) -> Machine:
        """The machine that it was measured on, of default links."""
        return Machine(
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            nics=self.nics,
            ranks_per_core=self.ranks_per_core,
        )

    def load(self) -> Load:
        """Return what the models say that it asked of links and processors."""
        return allreduce(self.shape, self.num_bytes, self.way)


def read_points(path: Path) -> list[Point]:
    """Read the points of a file of JSON."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["points"]
        return [Point(**values) for values in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no points to fit to: {error!r}; write some with hpctrain bench "
            f"allreduce --json FILE, or perf/bench_cost.py"
        ) from None


def write_points(path: Path, points: Sequence[Point], **facts: Any) -> None:
    """Write points, and ``facts`` about how they were measured, as JSON."""
    table = facts | {"points": [asdict(point) for point in points]}
    with publishing(path) as part:
        part.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Fit:
    """Figures of a machine, and how well the models meet the points with them."""

    points: tuple[Point, ...]
    per_unit: Load
    """Seconds for one of each field of a ``Load``."""
    held_out: float
    """Median relative error on the half of the points that the fit did not see, of both halves."""

    @property
    def error(self) -> float:
        """Median of the relative errors."""
        return float(np.median(np.abs(self.residuals)))

    @property
    def residuals(self) -> list[float]:
        """Predicted over measured time, less 1, of each point."""
        return [self.seconds(point) / point.seconds - 1 for point in self.points]

    def seconds(self, point: Point) -> float:
        """Return the time that the models predict for what a point measured."""
        return float(np.dot(point.load(), self.per_unit))

    def machine(self) -> Machine:
        """Return the largest machine of the points with the figures that were fitted.

        A figure that fits as well at no cost at all is infinitely fast; links that no point has
        used keep the machine's defaults.
        """
        largest = max(self.points, key=lambda point: (point.nodes, point.ranks_per_node))
        found, unit = largest.shape, self.per_unit
        node = Link(unit.node_rounds, _rate(unit.node_bytes))
        network = Link(unit.network_rounds, _rate(unit.network_bytes))
        return replace(
            found,
            node=node if any(p.ranks_per_node > 1 for p in self.points) else found.node,
            network=network if found.nodes > 1 else found.network,
            handle_bytes_per_s=_rate(unit.handled_bytes),
            reduce_bytes_per_s=_rate(unit.combined_bytes),
        )


def _rate(per_byte_s: float) -> float:
    return 1 / per_byte_s if per_byte_s else float("inf")


def fit(points: Sequence[Point], *, seed: int = 0) -> Fit:
    """Fit the figures of a machine to points.

    Errors by factor count, and those of points far off the others as if they were nearer (Huber's
    weights). To say how far the figures can be trusted, they are fitted to either half of the
    points too, drawn by ``seed``, and compared with the other half.

    Raises ``ConfigError``: too few points.

    Source: Huber 1964, "Robust estimation of a location parameter".
    """
    if len(points) < LEAST_POINTS:
        raise ConfigError(
            f"a fit takes {LEAST_POINTS} points or more, got {len(points)}; measure other sizes, "
            f"ways or numbers of nodes too"
        )
    order = np.random.default_rng(seed).permutation(len(points))
    halves = [[points[k] for k in order[start::2]] for start in range(2)]
    crossed = [Fit(tuple(b), _figures(a), 0.0) for a, b in (halves, halves[::-1])]
    held_out = np.median(np.abs([error for one in crossed for error in one.residuals]))
    return Fit(tuple(points), _figures(points), float(held_out))


def _figures(points: Sequence[Point]) -> Load:
    """Return the seconds for one of each field of a load; a codec's are seconds already."""
    *loads, codec_s = np.array([point.load() for point in points]).T
    seconds = np.array([point.seconds for point in points]) - codec_s
    return Load(*robust(np.array(loads).T, seconds).tolist())._replace(codec_s=1.0)


TURNS = 20
NEAR = 1.345  # in spreads of the errors, 95 % as good as least squares where none is off
LEAST_SPREAD = 0.01  # relative; below it all points count alike
FARTHEST = 100.0  # a point that is predicted as shorter by more is taken for so much


def robust(loads: Vector, seconds: Vector) -> Vector:
    """Return non-negative figures ``x`` so that ``loads @ x`` is near ``seconds``, by factor.

    Too long and too short count alike: an error is relative to the geometric mean of both.
    """
    weights, scale = np.ones(len(seconds)), seconds
    found = np.zeros(loads.shape[1])
    for _ in range(TURNS):
        found = non_negative(loads * (weights / scale)[:, None], weights * seconds / scale)
        predicted = loads @ found
        scale = np.sqrt(seconds * np.maximum(predicted, seconds / FARTHEST))
        errors = np.abs(predicted - seconds) / scale
        near = NEAR * max(1.4826 * float(np.median(errors)), LEAST_SPREAD)
        weights = np.sqrt(near / np.maximum(errors, near))
    return found


def non_negative(matrix: Vector, target: Vector) -> Vector:
    """Return the ``x`` without negative numbers that brings ``matrix @ x`` nearest to ``target``.

    Of few unknowns: every subset of them is tried.
    """
    scale = np.abs(matrix).max(axis=0)
    columns = np.flatnonzero(scale)
    best, least = np.zeros(matrix.shape[1]), float(target @ target)
    for many in range(1, len(columns) + 1):
        for subset in map(list, combinations(columns, many)):
            scaled = matrix[:, subset] / scale[subset]
            x = np.linalg.lstsq(scaled, target, rcond=None)[0]
            if (x < 0).any():
                continue
            rest = scaled @ x - target
            if float(rest @ rest) < least * (1 - 1e-9):
                least = float(rest @ rest)
                best = np.zeros(matrix.shape[1])
                best[subset] = x / scale[subset]
    return best
