"""Robust, non-negative fit of the parameters of a machine to measured all-reduces."""

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
from hpctrain.cost.collectives import AllreduceSpec, Load, allreduce
from hpctrain.cost.machine import Link, Machine

Vector = NDArray[np.float64]

LEAST_POINTS = len(Load._fields) - 1
"""One point for each fitted parameter; the seconds of a codec are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(CheckedFields):
    """A measured all-reduce over all ranks.

    Raises:
        ConfigError: a value is out of range.
    """

    nodes: Number
    ranks_per_node: Number
    nics: Number = 1  # network adapters per node
    algorithm: str
    """Name of the algorithm in a plan.

    On one node ``slices`` or ``direct``; on several nodes the algorithm between the nodes. If
    there are no rails, the algorithm over all ranks.
    """
    rails: Count  # 0 if the algorithm runs over all ranks
    codec: str = "none"
    ranks_per_core: Positive = 1.0
    """Ranks per core, by which the times of the processor are multiplied."""
    num_bytes: Number  # bytes of the message before the codec
    seconds: Positive  # seconds of the slowest rank

    @property
    def spec(self) -> AllreduceSpec:
        """Algorithm of the all-reduce; raises ``ConfigError`` if there is no model for it."""
        return AllreduceSpec(self.algorithm, self.rails, self.codec)

    @property
    def shape(self) -> Machine:
        """Machine of the measurement, with default speeds of links."""
        return Machine(
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            nics=self.nics,
            ranks_per_core=self.ranks_per_core,
        )

    def load(self) -> Load:
        """Return the predicted load of the all-reduce on links and processors."""
        return allreduce(self.shape, self.num_bytes, self.spec)


def read_points(path: Path) -> list[Point]:
    """Read points from a JSON file. Raises ``ConfigError`` if the file does not contain points."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["points"]
        return [Point(**values) for values in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} must be a JSON file with points, but reading failed: {error!r}; write points "
            f"with hpctrain bench allreduce --json FILE, or perf/bench_cost.py"
        ) from None


def write_points(path: Path, points: Sequence[Point], **facts: Any) -> None:
    """Write points, and ``facts`` about the measurement, to a JSON file."""
    table = facts | {"points": [asdict(point) for point in points]}
    with publishing(path) as part:
        part.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted parameters of a machine, and the errors of the times that they predict."""

    points: tuple[Point, ...]
    per_unit: Load
    """Seconds per unit of each field of a ``Load``."""
    held_out: float
    """Median relative error on points outside of the fit, by two-fold cross-validation."""

    @property
    def error(self) -> float:
        """Median relative error of the predicted times of all points."""
        return float(np.median(np.abs(self.residuals)))

    @property
    def residuals(self) -> list[float]:
        """Relative error of the predicted time of each point: predicted / measured - 1."""
        return [self.seconds(point) / point.seconds - 1 for point in self.points]

    def seconds(self, point: Point) -> float:
        """Return the predicted time of a point."""
        return float(np.dot(point.load(), self.per_unit))

    def machine(self) -> Machine:
        """Return the largest of the measured machines, with the fitted parameters.

        A rate is infinite if its fitted cost is zero. Links that no point used have
        default values.
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
    """Fit the parameters of a machine to measured points.

    The fit minimizes relative errors with Huber's weights, which limit the influence of outliers.
    ``Fit.held_out`` is measured by cross-validation: ``seed`` divides the points into two halves,
    and each half is predicted by a fit to the other half.

    Raises:
        ConfigError: there are fewer than ``LEAST_POINTS`` points.

    Source: Huber 1964, "Robust estimation of a location parameter".
    """
    if len(points) < LEAST_POINTS:
        raise ConfigError(
            f"a fit must have at least {LEAST_POINTS} points, got {len(points)}; measure more "
            f"sizes, algorithms or numbers of nodes"
        )
    order = np.random.default_rng(seed).permutation(len(points))
    halves = [[points[k] for k in order[start::2]] for start in range(2)]
    crossed = [Fit(tuple(b), _per_unit(a), 0.0) for a, b in (halves, halves[::-1])]
    held_out = np.median(np.abs([error for one in crossed for error in one.residuals]))
    return Fit(tuple(points), _per_unit(points), float(held_out))


def _per_unit(points: Sequence[Point]) -> Load:
    """Return the fitted seconds per unit of each field of a load; 1 for ``codec_s``."""
    *loads, codec_s = np.array([point.load() for point in points]).T
    seconds = np.array([point.seconds for point in points]) - codec_s
    return Load(*robust(np.array(loads).T, seconds).tolist())._replace(codec_s=1.0)


NUM_ITERATIONS = 20
NEAR = 1.345  # standard deviations, above which the weight of an error decreases
LEAST_SPREAD = 0.01  # relative error below which all points have equal weight
FARTHEST = 100.0  # largest factor by which a time may be underestimated


def robust(loads: Vector, seconds: Vector) -> Vector:
    """Return the non-negative ``x`` that minimizes the relative errors of ``loads @ x``.

    Errors are relative to the geometric mean of prediction and ``seconds``, so over- and
    underestimates have equal weight.
    """
    weights, scale = np.ones(len(seconds)), seconds
    found = np.zeros(loads.shape[1])
    for _ in range(NUM_ITERATIONS):
        found = non_negative(loads * (weights / scale)[:, None], weights * seconds / scale)
        predicted = loads @ found
        scale = np.sqrt(seconds * np.maximum(predicted, seconds / FARTHEST))
        errors = np.abs(predicted - seconds) / scale
        near = NEAR * max(1.4826 * float(np.median(errors)), LEAST_SPREAD)
        weights = np.sqrt(near / np.maximum(errors, near))
    return found


def non_negative(matrix: Vector, target: Vector) -> Vector:
    """Return the non-negative least-squares solution of ``matrix @ x = target``.

    The function tries every subset of columns, so the number of columns must be small.
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
