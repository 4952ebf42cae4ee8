"""Figures of a study."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hpctrain.report.figure import PARTS, RANKS, Estimate, Figure, Series, shown
from hpctrain.studies.records import PointRecord
from hpctrain.studies.results import PointSummary, StudyResults, label_of

LEVELS = {"node_bytes": "in nodes", "rail_bytes": "between nodes"}

_INTERVALS = "with intervals, whose confidence is in the table."
_LINES = {"dashed": "ideal", "dotted": "bound"}
_NOTES = {
    "repeats": "Small dots are the repeats.",
    "hollow": "Hollow: more ranks than cores, which shows that it works, not how fast.",
    "dashed": "Dashed: ideal, from the smallest point that has a core for each rank.",
    "dotted": "Dotted: what the model of the machine allows.",
}
"""What to say where a series is of such a kind."""


def figures_of(results: StudyResults) -> list[Figure]:
    """Return every figure that the data allow; none where nothing was measured."""
    kinds = (_by_size, _by_point) if results.done else ()
    found = [figure for kind in kinds for figure in kind(results)]
    return [_noted(figure) for figure in found if any(series.x for series in figure.series)]


def _noted(figure: Figure) -> Figure:
    kinds = {series.kind for series in figure.series if series.x}
    notes = [text for kind, text in _NOTES.items() if kind in kinds]
    return replace(figure, note=" ".join([figure.note, *notes]))


def _by_size(results: StudyResults) -> list[Figure]:
    """Return what changes with the number of ranks, curve by curve."""

    def rate(summary: PointSummary, seconds: float) -> float:
        first = summary.done[0]
        return first.samples / len(first.step_s) / seconds

    def share(summary: PointSummary, seconds: float) -> float:
        return (summary.ideal_s or 0) / seconds

    def figure(name: str, title: str, y_label: str, series: list[Series], **how: Any) -> Figure:
        about = {"note": f"Medians {_INTERVALS}", "scale": "log", **how}
        x_label = RANKS if _is_scaling(results) else ""
        return Figure(
            name=name, title=title, y_label=y_label, series=series, x_label=x_label, **about
        )

    steps = _points(results, lambda each: each.step_s, lambda each: each.mean_step_s)
    steps += _lines(results, lambda _, seconds: seconds)
    rates = _points(results, lambda each: each.samples_per_s, lambda each: each.samples_per_s)
    rates += _lines(results, rate)
    shares = _points(results, lambda each: each.efficiency) + _lines(results, share)
    times = _points(
        results,
        lambda each: each.median_of("time_to_target_s"),
        lambda record: record.time_to_target_s,
    )
    note = f"Ratios of medians {_INTERVALS} None where ranks outnumber cores."
    late = f"Medians {_INTERVALS} Only where every repeat reached it."
    title = f"Time to {label_of(results.config.study.target)}"
    return [
        figure("time", "Time of a step", "seconds", steps),
        figure("throughput", "Throughput", "samples per second", rates),
        figure("efficiency", "Efficiency", "part of the ideal", shares, note=note, scale="linear"),
        figure("time-to-target", title, "seconds", times, note=late),
    ]


def _by_point(results: StudyResults) -> list[Figure]:
    """Return what each point consists of, and what its repeats have learned."""
    names = [record.metric_name for record in results.done if record.metric is not None]
    name, learned = names[0] if names else None, []
    for colour, summary in enumerate(results.summaries):
        for record in summary.done:
            curve = results.learning_curve(record, name or "loss")
            end = (record.seconds, record.metric if name else record.loss)
            kind, label = "solid" if curve else "points", results.label(summary.point)
            learned.append(Series.of(curve or [end], kind=kind, name=label, colour=colour))
    return [
        Figure(
            name="breakdown",
            title="Where the time of a step went",
            y_label="seconds",
            note="Medians of repeats. Exposed communication is what computing did not hide.",
            series=_bars(results, PARTS),
            is_stacked=True,
        ),
        Figure(
            name="bytes",
            title="Bytes of a step",
            y_label="bytes, over all ranks",
            note="What moved through the memory of nodes, and what was sent between them.",
            series=_bars(results, LEVELS),
        ),
        Figure(
            name="learning",
            title="What was learned",
            x_label="seconds",
            y_label=shown(name or "loss"),
            note="A line for each repeat, by one rank; a point where only its end is known.",
            series=learned,
            scale="zoom",
        ),
    ]


def _is_scaling(results: StudyResults) -> bool:
    return len({each.ranks for each in results.summaries}) > 1


def _curves(results: StudyResults) -> Iterable[tuple[int, tuple[str, list[PointSummary]]]]:
    """Return colour, name and points of each curve; one where all sizes are alike."""
    found: dict[str, list[PointSummary]] = {}
    for summary in results.summaries:
        name = results.curve(summary.point) if _is_scaling(results) else ""
        found.setdefault(name, []).append(summary)
    return enumerate(found.items())


def _points(
    results: StudyResults,
    estimate: Callable[[PointSummary], Estimate | None],
    of_repeat: Callable[[PointRecord], float | None] = lambda _: None,
) -> list[Series]:
    """Return what each repeat says, and an estimate at each point."""
    found = []
    for colour, (name, summaries) in _curves(results):
        dots: list[tuple[Any, float | None]] = []
        told: dict[str, list[tuple[Any, Estimate | None]]] = {"points": [], "hollow": []}
        for each in summaries:
            x = each.ranks if _is_scaling(results) else results.label(each.point)
            told["hollow" if each.oversubscribed else "points"].append((x, y := estimate(each)))
            dots += [(x, of_repeat(record)) for record in each.done if y]
        found.append(Series.of(dots, kind="repeats", name=name, colour=colour))
        found += [Series.of(v, kind=kind, name=name, colour=colour) for kind, v in told.items()]
    return found


def _lines(results: StudyResults, value: Callable[[PointSummary, float], float]) -> list[Series]:
    """Return what ideal and model say at the points of each curve that were measured."""
    found = []
    for colour, (_, summaries) in _curves(results):
        measured = [each for each in summaries if each.step_s and _is_scaling(results)]
        times = {"dashed": [each.ideal_s for each in measured]}
        if results.bound:
            times["dotted"] = [results.bound(each.point) for each in measured]
        for kind, seconds in times.items():
            pairs = zip(measured, seconds, strict=True)
            values = [(each.ranks, value(each, least)) for each, least in pairs if least]
            found.append(Series.of(values, name=_LINES[kind], kind=kind, colour=colour))
    return found


def _bars(results: StudyResults, titles: Mapping[str, str]) -> list[Series]:
    """Return a bar for each field at each point where it is known."""
    found = []
    for colour, (name, title) in enumerate(titles.items()):
        values = [(results.label(each.point), each.median_of(name)) for each in results.summaries]
        found.append(Series.of(values, name=title, kind="bars", colour=colour))
    return found
