"""Comparison of a study with a repeated measurement, to test the conclusions of the study."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.text import Text

from hpctrain.core.errors import DataError
from hpctrain.report.figure import Estimate
from hpctrain.report.page import Cell, text_table
from hpctrain.studies.comparison import StudyComparison
from hpctrain.studies.statistics import ratio
from hpctrain.studies.study_file import REQUIRED
from hpctrain.studies.study_results import PointSummary, StudyResults, key_of, label_of

HOLDS, FAILS = "holds", "does not hold"

_HEADS = ("conclusion", "study", "now", "result")
_TIMES = "{:.2f} times"
_METHOD = (
    "A conclusion is a statement that the interval of the study proves or refutes. It holds if "
    "the new interval gives the same answer, does not hold if the new interval gives the opposite "
    "answer, and is undecided if the new interval allows both."
)


@dataclass(frozen=True)
class Statement:
    """A statement about a study, and whether its measurements prove or refute it."""

    text: str  # sentence if the statement is true
    negated: str  # sentence if the statement is false
    value: str  # the measured value, as text
    truth: bool | None  # None if the measurements do not decide


@dataclass(frozen=True)
class Conclusion:
    """A statement that a study decides, and the result of the repeated measurement."""

    before: Statement
    after: Statement | None  # None if the points were not measured again

    @property
    def text(self) -> str:
        """The statement, negated if the study refutes it."""
        return self.before.text if self.before.truth else self.before.negated

    @property
    def result(self) -> str:
        """``HOLDS``, ``FAILS``, or the reason why neither is known."""
        if self.after is None:
            return "not tested: no result with a core for each rank"
        if self.after.truth is None:
            return "undecided: more repeats are needed"
        return HOLDS if self.after.truth == self.before.truth else FAILS


class Reproduction:
    """Comparison of a study with its repeated measurement.

    Args:
        first: results of the study.
        again: results of the same points, measured again.
        required: efficiency, 0 to 1, with which the efficiency of each size is compared.
    """

    def __init__(
        self, first: StudyResults, again: StudyResults, required: float = REQUIRED
    ) -> None:
        self._first, self._again, self._required = first.own, again.own, required
        before, after = (_statements(each, required) for each in (self._first, self._again))
        self.conclusions = [
            Conclusion(statement, after.get(key))
            for key, statement in before.items()
            if statement.truth is not None
        ]
        self.num_undecided = len(before) - len(self.conclusions)
        """Number of statements that the study does not decide."""

    @property
    def holds(self) -> bool:
        """False if a conclusion does not hold."""
        return all(each.result != FAILS for each in self.conclusions)

    def summary(self, alpha: float = 0.05) -> RenderableType:
        """Return the text of the comparison for a terminal."""
        rows: list[list[Cell]] = [
            [each.text, each.before.value, each.after.value if each.after else "", each.result]
            for each in self.conclusions
        ]
        kept = sum(each.result == HOLDS for each in self.conclusions)
        lines = f"{kept} of {len(rows)} conclusions of the study hold."
        if self.num_undecided:
            lines += f" The study itself leaves {self.num_undecided} statements undecided."
        try:
            times = StudyComparison(self._first, self._again, alpha).summary()
        except DataError as error:
            times = Text(str(error))
        table = text_table(_HEADS, rows) if rows else Text("the study decides no statement")
        return Group(table, Text(f"{lines} {_METHOD}"), Text(), times)


def _statements(results: StudyResults, required: float) -> Mapping[str, Statement]:
    """Return the statements about a study; equal statements of two studies have equal keys."""
    return dict(_yielded(results, required))


def _yielded(results: StudyResults, required: float) -> Iterator[tuple[str, Statement]]:
    measured = [each for each in results.summaries if each.done]
    smaller: dict[str, PointSummary] = {}
    first: dict[int, PointSummary] = {}
    for each in measured:
        key, name, curve = key_of(each.point), results.label(each.point), results.curve(each.point)
        found = each.efficiency
        if found is not None and each.base is not None and each.ranks > each.base.ranks:
            where = f"efficiency at {name}"
            texts = f"{where} at least {required:.0%}", f"{where} below {required:.0%}"
            yield f"efficiency {key}", _above(texts, found, required, "{:.1%}")
        if found is not None and (before := smaller.get(curve)) and each.growth > before.growth:
            yield f"faster {key}", _faster(results, before, each)
        if found is not None:
            smaller[curve] = each
        variant = first.setdefault(each.ranks, each)
        if variant is not each and variant.oversubscribed == each.oversubscribed:
            yield f"variant {key}", _faster(results, variant, each)
        if target := results.config.study.target:
            reached = sum(record.time_to_target_s is not None for record in each.done)
            goal = f"repeat reaches {label_of(target)} at {name}"
            texts = f"every {goal}", f"not every {goal}"
            value, is_reached = f"{reached} of {len(each.done)}", reached == len(each.done)
            yield f"target {key}", Statement(*texts, value, is_reached)


def _faster(results: StudyResults, before: PointSummary, after: PointSummary) -> Statement:
    """Return the statement that ``after`` has shorter steps; undecided if they are equal."""
    one, other = results.label(after.point), results.label(before.point)
    texts = f"{one} has shorter steps than {other}", f"{one} has longer steps than {other}"
    speed = ratio(after.times_s, before.times_s)
    statement = _above(texts, speed, 1.0, _TIMES)
    return replace(statement, truth=None) if speed.low == 1.0 else statement


def _above(texts: tuple[str, str], found: Estimate, limit: float, form: str) -> Statement:
    """Return the statement that a value is at least ``limit``; ``texts[1]`` is its negation."""
    value = form.format(found.value)
    if found.low is None or found.high is None or found.falls_short:
        return Statement(*texts, f"{value}, too few repeats", None)
    ends = ", ".join(form.format(end).removesuffix(" times") for end in (found.low, found.high))
    is_undecided = found.low < limit <= found.high
    return Statement(*texts, f"{value} [{ends}]", None if is_undecided else found.low >= limit)
