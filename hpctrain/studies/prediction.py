"""Predictions beyond the measured sizes, and their validation on measured sizes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpctrain.core.errors import DataError
from hpctrain.core.units import format_seconds
from hpctrain.cost.extrapolation import (
    LEAST_SIZES,
    Extrapolation,
    MeasuredSize,
    Size,
    extrapolate,
)
from hpctrain.report.figure import CONFIDENCE, Estimate
from hpctrain.report.page import NOTHING, Cell, value_cell
from hpctrain.studies.points import MOST_RANKS
from hpctrain.studies.study_file import REQUIRED
from hpctrain.studies.study_results import PointSummary, StudyResults

FARTHEST = 4
"""Decisions are stated for sizes up to this multiple of the largest measured number of ranks."""

_ROUNDING = 1 + 1e-9  # exact predictions differ from measured times by rounding
_WIDE = "the interval is too wide to decide"


@dataclass(frozen=True)
class Forecast:
    """Predicted step time of a size, from the smaller sizes of its curve."""

    curve: str
    sources: Sequence[PointSummary]
    size: Size
    step_s: Extrapolation
    growth: float  # ideal step time of the base divided by the ideal step time of the size
    measured: PointSummary | None = None

    @property
    def efficiency(self) -> Extrapolation:
        """Parallel efficiency relative to the base point of the curve."""
        base = self.sources[0].step_s
        assert base is not None
        ideal_s, found = base.value / self.growth, self.step_s
        return Extrapolation(ideal_s / found.value, ideal_s / found.high, ideal_s / found.low)

    @property
    def error(self) -> float:
        """Relative error of the predicted step time; the size must be measured."""
        assert self.measured is not None
        assert self.measured.step_s is not None
        return self.step_s.value / self.measured.step_s.value - 1

    @property
    def holds(self) -> bool:
        """True if the intervals of the predicted and the measured step time overlap."""
        assert self.measured is not None
        found = self.measured.step_s
        assert found is not None
        low, high = (found.value if end is None else end for end in (found.low, found.high))
        return low <= self.step_s.high * _ROUNDING and self.step_s.low <= high * _ROUNDING

    def decision(self, required: float) -> str:
        """Return ``yes`` or ``no``: whether the size has the required efficiency.

        If the prediction does not decide this, return the reason and a remedy.
        """
        last = self.sources[-1]
        more = f"measure more than {last.ranks} ranks"
        if self.size.ranks > FARTHEST * last.ranks:
            return f"undecided: more than {FARTHEST} times the measured ranks; {more}"
        if self.efficiency.high < required:
            return "no"
        if self.size.nodes > 1 and last.records[0].layout.nodes == 1:
            return "undecided: no measured point has several nodes; measure 2 nodes"
        if self.efficiency.low >= required:
            return "yes"
        return f"undecided: {_WIDE}; {more}, or more repeats"


@dataclass(frozen=True)
class Prediction:
    """Forecasts of all curves of a study.

    Args:
        validation: forecasts of measured sizes, each from all smaller measured sizes.
        forecasts: forecasts of larger sizes.
        required: required efficiency, 0 to 1.
        lacking: a text for each curve that has too few sizes: its title and its number of sizes.
    """

    validation: list[Forecast]
    forecasts: list[Forecast]
    required: float
    lacking: list[str]

    @classmethod
    def of(
        cls, results: StudyResults, *, ranks: Sequence[int] = (), required: float = REQUIRED
    ) -> "Prediction":
        """Return the forecasts of a study.

        Args:
            results: results of the study.
            ranks: sizes to predict; by default twice and four times the largest measured size.
            required: required efficiency.

        Raises:
            DataError: a size is not larger than the measured sizes.
        """
        curves: dict[str, list[PointSummary]] = {}
        for each in results.summaries:
            if each.efficiency is not None:
                curves.setdefault(results.curve(each.point), []).append(each)
        found = cls([], [], required, [])
        for title, points in curves.items():
            distinct = list({each.ranks: each for each in points}.values())
            if len(distinct) < LEAST_SIZES:
                found.lacking.append(f"{title or results.config.study.name}: {len(distinct)}")
                continue
            found.validation.extend(_validation(results, title, distinct))
            largest = distinct[-1].ranks
            if too_small := [each for each in ranks if each <= largest]:
                raise DataError(
                    f"--ranks must be above {largest}, the largest measured size with a core for "
                    f"each rank, got {too_small[0]}; see the table of validation for smaller sizes"
                )
            if too_large := [each for each in ranks if each > MOST_RANKS]:
                raise DataError(f"--ranks must be at most {MOST_RANKS}, got {too_large[0]}")
            for size in ranks or (2 * largest, FARTHEST * largest):
                target = _grown(results, distinct, size)
                found.forecasts.append(_forecast(results, title, distinct, target))
        return found

    @property
    def text(self) -> str:
        """Sentences about method, validation and limits of the predictions."""
        num, kept = len(self.validation), sum(each.holds for each in self.validation)
        worst = max((abs(each.error) for each in self.validation), default=0.0)
        undecided = [
            each for each in self.forecasts if each.decision(self.required).startswith("undecided")
        ]
        sentences = [_METHOD]
        if num:
            sentences.append(
                f"In {kept} of {num} validations the intervals of the predicted and of the "
                f"measured time overlap; the largest error of a predicted time is {worst:.0%}."
            )
        if kept < num:
            sentences.append("Predictions of this study are therefore not reliable.")
        if undecided:
            sizes = sorted({each.size.ranks for each in undecided})
            sentences.append(
                f"For {', '.join(map(str, sizes))} ranks the prediction does not decide whether "
                f"the efficiency is at least {self.required:.0%}."
            )
        sentences += [
            f"A prediction needs {LEAST_SIZES} sizes with a core for each rank; measured sizes of "
            f"{each}."
            for each in self.lacking
        ]
        return " ".join(sentences)

    @property
    def validation_rows(self) -> list[list[Cell]]:
        """Cells of the validation table, in the order of ``VALIDATION_HEADS``."""
        rows: list[list[Cell]] = []
        for each in self.validation:
            assert each.measured is not None
            rows.append(
                [
                    each.curve or NOTHING,
                    ", ".join(str(source.ranks) for source in each.sources),
                    (str(each.size.ranks), each.size.ranks),
                    _cell(each.step_s, format_seconds),
                    value_cell(each.measured.step_s, format_seconds),
                    (f"{each.error:+.1%}", each.error),
                    "inside" if each.holds else "outside",
                ]
            )
        return rows

    @property
    def forecast_rows(self) -> list[list[Cell]]:
        """Cells of the table of predictions, in the order of ``forecast_heads``."""
        return [
            [
                each.curve or NOTHING,
                (str(each.size.ranks), each.size.ranks),
                (str(each.size.nodes), each.size.nodes),
                _cell(each.step_s, format_seconds),
                _cell(each.efficiency, "{:.1%}".format),
                each.decision(self.required),
            ]
            for each in self.forecasts
        ]

    @property
    def forecast_heads(self) -> list[str]:
        """Column heads of the table of predictions."""
        return ["curve", "ranks", "nodes", "step", "efficiency", f"{self.required:.0%} kept"]


VALIDATION_HEADS = ("curve", "predicted from", "ranks", "predicted", "measured", "error", "result")

_METHOD = (
    "Several models predict the time of a step: a power law, and sums of the time of computing, "
    "which is constant or divided among the ranks, and of overheads, which grow with the number n "
    "of ranks or nodes as (n - 1) / n, log n or n. The interval contains the predictions of all "
    "models that fit the measured sizes, with the noise of their repeats. The interval is widened "
    "if the largest measured size is outside the interval that the smaller sizes predict for it."
)


def _validation(
    results: StudyResults, title: str, points: Sequence[PointSummary]
) -> Iterator[Forecast]:
    """Yield a forecast of each measured size from the third on, made from all smaller sizes.

    A size with several nodes is skipped if all smaller sizes have one node.
    """
    for number in range(2, len(points)):
        known, actual = points[:number], points[number]
        _, nodes, _ = actual.records[0].layout
        if nodes == 1 or known[-1].records[0].layout.nodes > 1:
            yield _forecast(results, title, known, Size(actual.ranks, nodes), actual)


def _forecast(
    results: StudyResults,
    title: str,
    points: Sequence[PointSummary],
    size: Size,
    measured: PointSummary | None = None,
) -> Forecast:
    mode = results.config.mode_of(points[0].point)
    known = [
        MeasuredSize(each.ranks, each.records[0].layout.nodes, each.times_s) for each in points
    ]
    growth = size.ranks / points[0].ranks if mode == "strong" else 1.0
    found = extrapolate(known, size, mode)
    return Forecast(title, points, size, found, growth, measured)


def _grown(results: StudyResults, points: Sequence[PointSummary], ranks: int) -> Size:
    """Return a size of ``ranks`` ranks, with as many ranks per node as the last point.

    If the last point has one node, a node gets at least as many ranks as a host has cores.
    """
    _, nodes, each = points[-1].records[0].layout
    if nodes == 1:
        each = max(each, results.config.study.cores)
    return Size(ranks, -(-ranks // each))


def _cell(found: Extrapolation, form: Callable[[float], str]) -> Cell:
    ends = Estimate(value=found.value, low=found.low, high=found.high, confidence=CONFIDENCE)
    return value_cell(ends, form)
