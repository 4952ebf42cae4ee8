"""Figures of a study as plain values, which the page and the files draw alike."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hpctrain.studies.records import PointRecord
from hpctrain.studies.results import StudyResults, label_of, shown
from hpctrain.studies.statistics import Estimate, PointSummary, step_time_s

RANKS = "ranks"  # label of an axis of sizes, which grow by factors

PARTS = {
    "compute": "computing",
    "communication": "exposed communication",
    "input": "input",
    "idle": "idle",
}
LEVELS = {"node_bytes": "in nodes", "rail_bytes": "between nodes"}

_INTERVALS = "with 95 % intervals."
_LINES = {"dashed": "ideal", "dotted": "bound"}
_NOTES = {
    "repeats": "Small dots are the repeats.",
    "hollow": "Hollow: more ranks than cores, which shows that it works, not how fast.",
    "dashed": "Dashed: ideal, from the smallest point that has a core for each rank.",
    "dotted": "Dotted: what the model of the machine allows.",
}
"""What to say where a series is of such a kind."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values that belong together."""

    name: str
    kind: Literal["points", "hollow", "repeats", "solid", "dashed", "dotted", "bars"]
    colour: int  # series of one curve share it
    x: list[Any]
    y: list[float]
    below: list[float] | None = None  # how far an interval reaches from y
    above: list[float] | None = None

    @classmethod
    def of(cls, values: Iterable[tuple[Any, float | None]], **how: Any) -> "Series":
        """Make one of pairs of x and y, without those that nobody knows."""
        told = [(x, y) for x, y in values if y is not None and math.isfinite(y)]
        return cls(x=[x for x, _ in told], y=[y for _, y in told], **how)

    @classmethod
    def of_estimates(cls, values: Iterable[tuple[Any, Estimate]], **how: Any) -> "Series":
        """Make one of estimates with their intervals."""
        told = list(values)
        return cls(
            x=[x for x, _ in told],
            y=[got.value for _, got in told],
            below=[0 if got.low is None else got.value - got.low for _, got in told],
            above=[0 if got.high is None else got.high - got.value for _, got in told],
            **how,
        )


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


def figures_of(results: StudyResults) -> list[Figure]:
    """Return every figure that the data allow; none where nothing was measured."""
    kinds = (_time, _throughput, _efficiency, _breakdown, _bytes, _time_to_target, _learning)
    found = [kind(results) for kind in kinds] if results.done else []
    return [_noted(figure) for figure in found if any(series.x for series in figure.series)]


def _noted(figure: Figure) -> Figure:
    kinds = {series.kind for series in figure.series if series.x}
    notes = [text for kind, text in _NOTES.items() if kind in kinds]
    return replace(figure, note=" ".join([figure.note, *notes]))


def _time(results: StudyResults) -> Figure:
    return Figure(
        name="time",
        title="Time of a step",
        x_label=_x_label(results),
        y_label="seconds",
        note=f"Medians {_INTERVALS}",
        series=_points(results, lambda each: each.step_s, step_time_s)
        + _lines(results, lambda _, seconds: seconds),
        scale="log",
    )


def _throughput(results: StudyResults) -> Figure:
    def rate(summary: PointSummary, seconds: float) -> float:
        first = results.repeats(summary.point)[0]
        return first.samples / len(first.step_s) / seconds

    return Figure(
        name="throughput",
        title="Throughput",
        x_label=_x_label(results),
        y_label="samples per second",
        note=f"Harmonic means {_INTERVALS}",
        series=_points(results, lambda each: each.samples_per_s, lambda r: r.samples_per_s)
        + _lines(results, rate),
        scale="log",
    )


def _efficiency(results: StudyResults) -> Figure:
    def share(summary: PointSummary, seconds: float) -> float:
        return (results.ideal_s(summary) or 0) / seconds

    return Figure(
        name="efficiency",
        title="Efficiency",
        x_label=_x_label(results),
        y_label="part of the ideal",
        note=f"Ratios of medians {_INTERVALS} None where ranks outnumber cores.",
        series=_points(results, lambda each: each.efficiency) + _lines(results, share),
    )


def _breakdown(results: StudyResults) -> Figure:
    return Figure(
        name="breakdown",
        title="Where the time of a step went",
        y_label="seconds",
        note="Medians of repeats. Exposed communication is what computing did not hide.",
        series=_bars(results, PARTS, lambda each, part: each.breakdown_s.get(part)),
        is_stacked=True,
    )


def _bytes(results: StudyResults) -> Figure:
    def moved(summary: PointSummary, name: str) -> float | None:
        found = results.median_of(summary.point, name)
        return None if found is None else found.value

    return Figure(
        name="bytes",
        title="Bytes of a step",
        y_label="bytes, over all ranks",
        note="What moved through the memory of nodes, and what was sent between them.",
        series=_bars(results, LEVELS, moved),
    )


def _time_to_target(results: StudyResults) -> Figure:
    return Figure(
        name="time-to-target",
        title=f"Time to {label_of(results.facts.target or {})}",
        x_label=_x_label(results),
        y_label="seconds",
        note=f"Medians {_INTERVALS} Only where every repeat reached it.",
        series=_points(
            results,
            lambda each: results.median_of(each.point, "time_to_target_s"),
            lambda record: record.time_to_target_s,
        ),
        scale="log",
    )


def _learning(results: StudyResults) -> Figure:
    names = [record.metric_name for record in results.done if record.metric is not None]
    name = names[0] if names else None
    series = []
    for colour, summary in enumerate(results.summaries):
        how: dict[str, Any] = {"name": results.label(summary.point), "colour": colour}
        for record in results.repeats(summary.point):
            curve = results.learning_curve(record, name or "loss")
            end = (record.seconds, record.metric if name else record.loss)
            series.append(Series.of(curve or [end], kind="solid" if curve else "points", **how))
    return Figure(
        name="learning",
        title="What was learned",
        x_label="seconds",
        y_label=shown(name or "loss"),
        note="A line for each repeat, by one of its ranks; a point where only its end is known.",
        series=series,
        scale="zoom",
    )


def _points(
    results: StudyResults,
    estimate: Callable[[PointSummary], Estimate | None],
    of_repeat: Callable[[PointRecord], float | None] = lambda _: None,
) -> list[Series]:
    """Return what each repeat says, and an estimate at each point."""
    found = []
    for colour, (name, summaries) in enumerate(_curves(results).items()):
        how: dict[str, Any] = {"name": name, "colour": colour}
        told = [(_x(results, each), each, got) for each in summaries if (got := estimate(each))]
        dots = [(x, of_repeat(r)) for x, each, _ in told for r in results.repeats(each.point)]
        full = [(x, got) for x, each, got in told if not each.oversubscribed]
        hollow = [(x, got) for x, each, got in told if each.oversubscribed]
        found += [
            Series.of(dots, kind="repeats", **how),
            Series.of_estimates(full, kind="points", **how),
            Series.of_estimates(hollow, kind="hollow", **how),
        ]
    return found


def _lines(results: StudyResults, value: Callable[[PointSummary, float], float]) -> list[Series]:
    """Return what ideal and model say at the points of each curve that were measured."""
    found = []
    for colour, summaries in enumerate(_curves(results).values()):
        measured = [each for each in summaries if each.step_s]
        times = {"dashed": [results.ideal_s(each) for each in measured]}
        if results.bound:
            times["dotted"] = [results.bound(each.point) for each in measured]
        for kind, seconds in times.items():
            pairs = zip(measured, seconds, strict=True)
            values = [(each.ranks, value(each, least)) for each, least in pairs if least]
            found.append(Series.of(values, name=_LINES[kind], kind=kind, colour=colour))
    return found if _x_label(results) else []


def _bars(
    results: StudyResults,
    titles: Mapping[str, str],
    value: Callable[[PointSummary, str], float | None],
) -> list[Series]:
    """Return a bar for each name at each point where it is known."""
    found = []
    for colour, (name, title) in enumerate(titles.items()):
        values = [(results.label(each.point), value(each, name)) for each in results.summaries]
        found.append(Series.of(values, name=title, kind="bars", colour=colour))
    return found


def _curves(results: StudyResults) -> dict[str, list[PointSummary]]:
    """Return the points of each curve; where sizes are all alike, there is one curve."""
    found: dict[str, list[PointSummary]] = {}
    for summary in results.summaries:
        name = results.curve(summary.point) if _x_label(results) else ""
        found.setdefault(name, []).append(summary)
    return found


def _x_label(results: StudyResults) -> str:
    return RANKS if len({each.ranks for each in results.summaries}) > 1 else ""


def _x(results: StudyResults, summary: PointSummary) -> Any:
    return summary.ranks if _x_label(results) else results.label(summary.point)
