"""Description of figures as plain data, from which pages and image files are drawn."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

RANKS = "ranks"  # label of an x axis that shows numbers of ranks; the axis is logarithmic

PARTS = {
    "compute_s": "computing",
    "communication_s": "exposed communication",
    "input_s": "input",
    "idle_s": "idle",
}
"""Titles of the parts of a step, by their names in records."""

CONFIDENCE = 0.95

MAX_NAME = 60  # characters of a name in a figure or a table

Kind = Literal[
    "points", "hollow", "repeats", "solid", "faint", "linked", "dashed", "dotted", "bars", "area",
    "marks",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value with the confidence interval of the true value."""

    value: float
    low: float | None  # None for a single sample
    high: float | None
    confidence: float  # confidence of the interval
    wanted: float = CONFIDENCE  # requested confidence, which few samples may not reach

    @property
    def falls_short(self) -> bool:
        """True if the samples are too few for the requested confidence."""
        return self.confidence < self.wanted - 1e-12


@dataclass(frozen=True, kw_only=True)
class Series:
    """Series of a figure: values of x and y. The kind ``marks`` draws vertical lines at x."""

    name: str
    kind: Kind
    colour: int  # index of the colour, equal for all series of a curve
    x: list[Any]
    y: list[float | None]  # None is a gap in a line
    below: list[float] | None = None  # distance from y to the lower end of the interval
    above: list[float] | None = None
    width: float = 1.5  # width of a line; differs between runs, so that equal lines stay visible

    @classmethod
    def of(cls, values: Iterable[tuple[Any, Estimate | float | None]], **how: Any) -> "Series":
        """Return a series of pairs (x, y), without pairs whose y is None or not finite."""
        known = [(x, y) for x, y in values if y is not None and math.isfinite(_value(y))]
        got = [y for _, y in known if isinstance(y, Estimate)]
        if got:
            how["below"] = [0 if y.low is None else y.value - y.low for y in got]
            how["above"] = [0 if y.high is None else y.high - y.value for y in got]
        return cls(x=[x for x, _ in known], y=[_value(y) for _, y in known], **how)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with one pair of axes. Without ``x_label``, the values of x are names."""

    name: str  # name of the files of the figure
    title: str
    y_label: str
    note: str
    series: list[Series]
    x_label: str = ""
    scale: Literal["linear", "log", "zoom"] = "linear"  # scale of the y axis; linear starts at 0
    is_stacked: bool = False
    top: float | None = None  # upper end of the y axis; None shows all values
    warning: str = ""  # shown in the figure


def shown(value: Any, width: int = MAX_NAME) -> str:
    """Return a value as one short line without control characters, for use as a label."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))
    return text if len(text) <= width else f"{text[: width - 1]}\N{HORIZONTAL ELLIPSIS}"


def _value(found: Estimate | float) -> float:
    return found.value if isinstance(found, Estimate) else found
