"""Figures as plain values, the input of pages and of image files."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

RANKS = "ranks"  # label of an axis of sizes, which grow by factors

PARTS = {
    "compute_s": "computing",
    "communication_s": "exposed communication",
    "input_s": "input",
    "idle_s": "idle",
}
"""Where the time of a step goes, by names of records."""

CONFIDENCE = 0.95

MAX_NAME = 60  # characters of a name in a figure or a table

Kind = Literal[
    "points", "hollow", "repeats", "solid", "faint", "linked", "dashed", "dotted", "bars", "area",
    "marks",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value, and the interval that holds the true one with a confidence."""

    value: float
    low: float | None  # None for a single sample
    high: float | None
    confidence: float  # that of the interval
    wanted: float = CONFIDENCE  # which few samples cannot give

    @property
    def falls_short(self) -> bool:
        """Whether the samples are too few for the confidence that was wanted."""
        return self.confidence < self.wanted - 1e-12


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values that belong together. Of ``marks`` only x is drawn, as lines across the figure."""

    name: str
    kind: Kind
    colour: int  # series of one curve share it
    x: list[Any]
    y: list[float | None]  # None is a gap in a line
    below: list[float] | None = None  # how far an interval reaches from y
    above: list[float] | None = None
    width: float = 1.5  # of a line; differs between runs, so that equal lines stay visible

    @classmethod
    def of(cls, values: Iterable[tuple[Any, Estimate | float | None]], **how: Any) -> "Series":
        """Make a series from pairs of x and y, without unknown values."""
        known = [(x, y) for x, y in values if y is not None and math.isfinite(_value(y))]
        got = [y for _, y in known if isinstance(y, Estimate)]
        if got:
            how["below"] = [0 if y.low is None else y.value - y.low for y in got]
            how["above"] = [0 if y.high is None else y.high - y.value for y in got]
        return cls(x=[x for x, _ in known], y=[_value(y) for _, y in known], **how)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One pair of axes. Without a label, x are names."""

    name: str  # of its files
    title: str
    y_label: str
    note: str
    series: list[Series]
    x_label: str = ""
    scale: Literal["linear", "log", "zoom"] = "linear"  # of y; linear begins at 0
    is_stacked: bool = False
    top: float | None = None  # where y ends; all of it is seen where there is none
    warning: str = ""  # shown in the figure


def shown(value: Any, width: int = MAX_NAME) -> str:
    """Return a value as a short line without control characters, for labels of any kind."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))
    return text if len(text) <= width else f"{text[: width - 1]}\N{HORIZONTAL ELLIPSIS}"


def _value(found: Estimate | float) -> float:
    return found.value if isinstance(found, Estimate) else found
