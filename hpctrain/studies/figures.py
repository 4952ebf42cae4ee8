"""Figures of the report of a study."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hpctrain.report.figure import PARTS, RANKS, Figure, Kind, Series, shown
from hpctrain.studies.study_results import PointSummary, StudyResults, label_of

LEVELS = {"node_bytes": "in nodes", "rail_bytes": "between nodes"}

EFFICIENCY = "efficiency"
SPEED_UP = "speed_up"
_RATIOS = (EFFICIENCY, SPEED_UP)

_Line = Callable[[PointSummary, float], float]
"""Returns the value that a figure shows for a point and a step time in seconds."""

_INTERVALS = "over repeats. Error bars are confidence intervals, by a {test} test."
_LINES: dict[Kind, str] = {"dashed": "ideal", "dotted": "bound of the machine"}
_MANY = "more ranks than cores"
_ABOUT = {
    EFFICIENCY: "No value if ranks outnumber cores.",
    SPEED_UP: "No value if ranks outnumber cores.",
    "core-hours": "Only points with a core for each rank.",
    "time-to-target": "From the start of the first step, only if every repeat reached the target.",
}
_NOTES = {
    "repeats": "Crosses are the repeats; none is dropped.",
    "hollow": "Hollow: more ranks than cores, so that the time is not a measure of speed.",
    "dashed": "Dashed: ideal, from the smallest point that has a core for each rank.",
    "dotted": "Dotted: bound by the model of the machine.",
}
"""Notes about the kinds of series; a figure has the notes of its kinds."""


def figures_of(results: StudyResults) -> list[Figure]:
    """Return all figures for which the study has data."""
    kinds = (_by_size, _by_point) if results.done else ()
    found = [figure for kind in kinds for figure in kind(results)]
    return [_noted(figure) for figure in found if any(series.x for series in figure.series)]


def _noted(figure: Figure) -> Figure:
    kinds = {series.kind for series in figure.series if series.x}
    notes = [text for kind, text in _NOTES.items() if kind in kinds]
    return replace(figure, note=" ".join([figure.note, *notes]))


def _by_size(results: StudyResults) -> Iterator[Figure]:
    """Yield the figures whose x axis is the number of ranks."""
    target = f"Time to {label_of(results.config.study.target)}"
    rows: list[tuple[str, str, str, str, _Line | None]] = [
        ("time", "Time of a step", "seconds", "mean_step_s", lambda _, seconds: seconds),
        ("throughput", "Throughput", "samples per second", "samples_per_s", _rate),
        (SPEED_UP, "Speed-up", "speed-up over the smallest point", SPEED_UP, _speed_up),
        (EFFICIENCY, "Parallel efficiency", "fraction of linear scaling", EFFICIENCY, _share),
        ("core-hours", "Cost", f"{results.unit} per million samples", "core_hours", _cost),
        ("time-to-target", target, "seconds", "time_to_target_s", None),
    ]
    for name, title, y_label, field, line in rows:
        is_ratio = name in _RATIOS
        what, test = ("Ratios of medians", "rank-sum") if is_ratio else ("Medians", "sign")
        yield Figure(
            name=name,
            title=title,
            x_label=RANKS if _is_scaling(results) else "",
            y_label=y_label,
            note=f"{what} {_INTERVALS.format(test=test)} {_ABOUT.get(name, '')}".rstrip(),
            series=_series(results, field, line),
            scale="linear" if name == EFFICIENCY else "log",
        )


def _rate(summary: PointSummary, seconds: float) -> float:
    return summary.done[0].batch / seconds


def _share(summary: PointSummary, seconds: float) -> float:
    return (summary.ideal_s or 0) / seconds


def _speed_up(summary: PointSummary, seconds: float) -> float:
    base = summary.base.ranks if summary.base else summary.ranks
    return _share(summary, seconds) * summary.ranks / base


def _cost(summary: PointSummary, seconds: float) -> float:
    return 1e6 * summary.ranks / _rate(summary, seconds) / 3600


def _by_point(results: StudyResults) -> list[Figure]:
    """Return the figures of the parts of a step, the bytes of a step, and the learning curves."""
    name = next((each.metric_name for each in results.done if each.metric is not None), None)
    learned, sent = list[Series](), list[Series]()
    how: dict[str, Any] = {"y_label": shown(name or "loss"), "scale": "zoom"}
    for colour, summary in enumerate(results.summaries):
        for record in summary.done:
            curve = results.learning_curve(record, name or "loss")
            end = (record.elapsed_s, record.metric if name else record.loss)
            kind, label = "solid" if curve[1:] else "points", results.label(summary.point)
            ended = [end] if record.elapsed_s else []
            learned.append(Series.of(curve or ended, kind=kind, name=label, colour=colour))
            crossed = (record.rail_bytes or 0) * (record.num_steps + record.warm_up_steps)
            ends = [(crossed, end[1])] if crossed else []
            sent.append(Series.of(ends, kind="points", name=label, colour=colour))
    return [
        Figure(
            name="breakdown",
            title="Parts of the time of a step",
            y_label="seconds",
            note="Medians of repeats. Exposed communication is not hidden by computation.",
            series=_bars(results, PARTS),
            is_stacked=True,
        ),
        Figure(
            name="bytes",
            title="Bytes of a step",
            y_label="bytes, over all ranks",
            note="Bytes copied in the memory of nodes, and bytes sent between nodes.",
            series=_bars(results, LEVELS),
        ),
        Figure(
            name="learning",
            title="Learning curves",
            x_label="seconds from the start of the first step",
            note="A line for each repeat, from one rank; a point if only the end is known.",
            series=learned,
            **how,
        ),
        Figure(
            name="learned-by-bytes",
            title="Learning by bytes sent",
            x_label="bytes between nodes, of all ranks and steps",
            note="A point for the end of each repeat. On one node no bytes are sent.",
            series=sent,
            **how,
        ),
    ]


def _is_scaling(results: StudyResults) -> bool:
    return len({each.ranks for each in results.summaries}) > 1


def _series(results: StudyResults, field: str, line: _Line | None) -> list[Series]:
    """Return the series of a field: the repeats, their medians, the ideal and the machine's bound.

    Each curve has its own series. A study of one size has one curve. The lines of the ideal and of
    the bound have a value at each measured size.
    """
    is_scaling, found = _is_scaling(results), []
    lines: list[Series] = []
    curves: dict[str, list[PointSummary]] = {}
    for summary in results.summaries:
        name = results.curve(summary.point) if is_scaling else ""
        curves.setdefault(name, []).append(summary)
    for colour, (name, summaries) in enumerate(curves.items()):
        measured: dict[Kind, list[tuple[Any, Any]]] = {"repeats": [], "points": [], "hollow": []}
        least: dict[Kind, list[tuple[Any, Any]]] = {"dashed": [], "dotted": []}
        for one in summaries:
            x = one.ranks if is_scaling else results.label(one.point)
            y = getattr(one, field) if field in _RATIOS else one.median_of(field)
            measured["hollow" if one.oversubscribed else "points"].append((x, y))
            if y and field not in _RATIOS:
                measured["repeats"] += [(x, getattr(record, field)) for record in one.done]
            if line and one.step_s and is_scaling:
                bound_s = results.bound(one.point) if results.bound else None
                least["dashed"] += [(x, line(one, one.ideal_s))] if one.ideal_s else []
                least["dotted"] += [(x, line(one, bound_s))] if bound_s else []
        own = f"{name}: " if name else ""
        names: dict[Kind, str] = {
            "repeats": "each repeat",
            "points": f"{own}{_measured(summaries, field)}",
            "hollow": f"{own}{_MANY}",
        }
        found += [
            Series.of(v, kind=kind, name=names[kind], colour=colour)
            for kind, v in measured.items()
        ]
        lines += [
            Series.of(v, kind=kind, name=f"{own}{_LINES[kind]}", colour=colour)
            for kind, v in least.items()
        ]
    return found + list(map(partial(_shared, lines), lines))


def _shared(lines: Sequence[Series], line: Series) -> Series:
    """Return ``line``, with a common name and colour if the lines of all curves coincide."""
    same = [each for each in lines if each.kind == line.kind]
    points = {point for each in same for point in zip(each.x, each.y, strict=True)}
    is_shared = len(points) == len({x for x, _ in points})
    return replace(line, name=_LINES[line.kind], colour=same[0].colour) if is_shared else line


def _measured(summaries: Sequence[PointSummary], field: str) -> str:
    """Return the text of the legend for the medians and their error bars."""
    kept = [each.efficiency if field in _RATIOS else each.median_of(field) for each in summaries]
    confidences = {
        round(100 * each.confidence, 1) for each in kept if each and each.low != each.high
    }
    what = "ratio of medians" if field in _RATIOS else "median"
    if not confidences:
        return what
    least, most = min(confidences), max(confidences)
    range_text = f"{least:g}" if least == most else f"{least:g} to {most:g}"
    return f"{what}, bars: {range_text} % interval"


def _bars(results: StudyResults, titles: Mapping[str, str]) -> list[Series]:
    """Return the series of bars: the median of each field at each point."""
    found = []
    for colour, (name, title) in enumerate(titles.items()):
        values = [(results.label(each.point), each.median_of(name)) for each in results.summaries]
        found.append(Series.of(values, name=title, kind="bars", colour=colour))
    return found
