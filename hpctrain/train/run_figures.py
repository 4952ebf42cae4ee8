"""Figures of runs: losses, metrics, throughput and times of steps."""

import math
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

from hpctrain.core.atomic import explained_writes
from hpctrain.core.errors import ConfigError
from hpctrain.report.drawing import draw_panels
from hpctrain.report.figure import PARTS, Figure, Kind, Series
from hpctrain.train.history import LOSS, TIMES, Record, RunHistory, labelled

FORMATS = (".png", ".svg", ".pdf")
MAX_POINTS = 2000  # maximum number of points of a curve; a screen cannot resolve more
MAX_RANKS = 32  # maximum number of bars in a figure
MAX_MARKS = 20  # maximum number of marks of one kind for each run

_AVERAGED = 25
"""By default, each point of a curve is an average over 1/25 of the records of the curve."""
_CUT = " Higher peaks are cut off."
_FEW = 20  # a curve with fewer records marks each point
_HIGH = 2.0  # peaks above this multiple of the 95th percentile are cut off

_Style = tuple[str, int, Kind]  # name, colour and kind of a curve of a single run
_TRAINING: _Style = ("training", 2, "solid")
_GREY, _RED = 7, 1
_TIMES = {name: PARTS[name] for name in TIMES}

Rows = Callable[[RunHistory], list[Record]]


def figures_of(runs: Sequence[RunHistory], smooth: int = 0) -> list[Figure]:
    """Return all figures for which there are records; each figure has the curves of all runs.

    Args:
        runs: one or more runs.
        smooth: number of records over which curves are averaged; 1 for no averaging; 0 chooses
            this number from the number of records.
    """
    noise = "Batch size in samples at which noise and signal of the gradient are equal."
    away = "Root mean square distance of the replicas from their mean."
    coded = _steps_with("won_s")
    coded_bytes = "Per step, with compression."
    won = "Per step, against the measured link without compression."
    found = [
        _losses(runs, smooth),
        *_metrics(runs),
        _by_step(runs, "lr", "Learning rate", "In the last step of a record."),
        _times(runs),
        _by_step(runs, "samples_per_s", "Samples per second", "Over all ranks.", smooth=smooth),
        _by_step(runs, "drift", "Distance of replicas", away, _steps_with("drift")),
        _by_step(runs, "noise_scale", "Gradient noise scale", noise, _steps_with("noise_scale")),
        _by_step(runs, "rail_bytes", "Bytes between nodes", coded_bytes, coded),
        _by_step(runs, "won_s", "Seconds won by compression", won, coded),
        *_ranks(runs),
    ]
    return [figure for figure in found if any(s.x for s in figure.series if s.kind != "marks")]


def _steps_with(name: str) -> Rows:
    """Return a function that selects the step records of a run with the entry ``name``."""
    return lambda run: [each for each in run.of("step") if name in each]


def draw_runs(
    runs: Sequence[RunHistory],
    path: Path,
    smooth: int = 0,
    *,
    elsewhere: str = "name another file with --out",
) -> None:
    """Draw all figures of runs into one image file.

    Args:
        runs: one or more runs.
        path: image file with a suffix in ``FORMATS``.
        smooth: as in ``figures_of``.
        elsewhere: remedy in the error message if the file cannot be written.

    Raises:
        ConfigError: the suffix is unknown, or the file cannot be written.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"the file of a plot must end in {', '.join(FORMATS)}, got {path}; name another file"
        )
    is_one = len(runs) == 1
    figures = figures_of(runs, smooth)
    figures = [each for each in figures if is_one or not each.name.startswith("ranks")]
    lines = labelled(runs, "headline")
    lines += [] if figures else ["no step is recorded yet"]
    with explained_writes("the file of a plot", path, elsewhere):
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_panels(figures, path, ", ".join(run.title for run in runs), "\n".join(lines))


def draw_run(directory: Path, path: Path) -> None:
    """Draw a run from its files at the end of training.

    Raises:
        ConfigError: as ``draw_runs``.
    """
    elsewhere = "train without plots by --set log.plots=false"
    draw_runs([RunHistory.read(directory)], path, elsewhere=elsewhere)


def _losses(runs: Sequence[RunHistory], smooth: int) -> Figure:
    series = _curves(runs, methodcaller("of", "step"), LOSS, _TRAINING, smooth)
    series += _curves(runs, methodcaller("of", "test"), LOSS, _tests(runs))
    values = [y for each in series for y in each.y if y is not None and y > 0]
    is_wide = bool(values) and max(values) > 10 * min(values)
    return Figure(
        name=LOSS,
        title="Loss",
        x_label="step",
        y_label=LOSS,
        note=f"Pale: as recorded; full: averaged over records; dots: {_splits(runs)} samples.",
        series=[*series, *_marks(runs)],
        scale="log" if is_wide else "zoom",
        warning="; ".join(labelled(runs, "warning")),
    )


def _splits(runs: Sequence[RunHistory]) -> str:
    """Return the name of the samples used by tests during training: ``test`` or ``validation``."""
    return " or ".join(dict.fromkeys(run.tested for run in runs))


def _tests(runs: Sequence[RunHistory]) -> _Style:
    return _splits(runs), 5, "linked"


def _metrics(runs: Sequence[RunHistory]) -> Iterator[Figure]:
    """Yield a figure for each metric of the runs."""
    tests = {run.label: [t | run.metrics_of(t) for t in run.of("test")] for run in runs}
    splits = _splits(runs)
    found = (run.metrics_of(test) for run in runs for test in run.of("test"))
    for number, name in enumerate(dict.fromkeys(name for metrics in found for name in metrics)):
        series = _curves(runs, lambda run: tests[run.label], name, _tests(runs))
        yield Figure(
            name=f"metric-{number}",
            title=f"{splits.capitalize()} {name}",
            x_label="step",
            y_label=name,
            note=f"Of all {splits} samples.",
            series=[*series, *_marks(runs)],
            scale="zoom",
        )


def _by_step(
    runs: Sequence[RunHistory],
    name: str,
    title: str,
    note: str,
    rows: Rows = lambda run: run.of("step"),
    *,
    smooth: int = 1,
) -> Figure:
    """Return a figure of the entry ``name`` in step records."""
    series = [*_curves(runs, rows, name, ("", 2, "solid"), smooth), *_marks(runs)]
    top = _top([y for each in series for y in each.y if y is not None])
    return Figure(
        name=name,
        title=title,
        x_label="step",
        y_label=title.lower(),
        note=note + (_CUT if top else ""),
        series=series,
        top=top,
    )


def _curves(
    runs: Sequence[RunHistory], rows: Rows, name: str, style: _Style, smooth: int = 1
) -> list[Series]:
    """Return curves of the entry ``name`` over steps; runs differ in colour and line width."""
    label, colour, kind = style
    found = []
    for number, run in enumerate(runs):
        records = rows(run)
        x = _thin([record["step"] for record in records])
        y = [record.get(name) for record in records]
        thick = 1.5
        if len(runs) > 1:  # the first curve is the widest, so equal curves remain visible
            colour, thick = number, 1.5 + 2.0 * (1 - number / (len(runs) - 1))
        own = label if len(runs) == 1 else f"{run.label} {label}".rstrip()
        width = smooth or max(1, len(y) // _AVERAGED)
        if width > 1:
            found.append(Series(name=own, kind="faint", colour=colour, x=x, y=_thin(y)))
        # With few records the curve marks each point.
        drawn: Kind = "linked" if len(y) < _FEW else kind
        y = _thin(_averaged(y, width))
        found.append(Series(name=own, kind=drawn, colour=colour, x=x, y=y, width=thick))
    return found


def _averaged(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return bias-corrected exponential moving averages; None values stay None."""
    decay, total, weight = 1 - 2 / (width + 1), 0.0, 0.0
    found: list[float | None] = []
    for value in values:
        if value is not None:
            total, weight = decay * total + value, decay * weight + 1
        found.append(None if value is None else total / weight)
    return found


def _thin(values: Sequence[Any]) -> list[Any]:
    return list(values[:: max(1, math.ceil(len(values) / MAX_POINTS))])


def _top(values: Sequence[float]) -> float | None:
    """Return an upper limit of the axis that cuts off high peaks; None without high peaks."""
    high = _HIGH * sorted(values)[int(0.95 * len(values))] if values else 0.0
    return high if 0 < high < max(values) else None


def _marks(runs: Sequence[RunHistory]) -> list[Series]:
    """Return marks at the steps where a run was resumed, or where a loss is not finite."""
    found = []
    for number, run in enumerate(runs):
        name, colour = ("", _GREY) if len(runs) == 1 else (f"{run.label} ", number)
        marks = {f"{name}resumed": (run.resumes, colour), f"{name}not finite": (run.gaps, _RED)}
        found += [
            Series(name=text, kind="marks", colour=own, x=x[:MAX_MARKS], y=[])
            for text, (x, own) in marks.items()
            if x
        ]
    return found


def _times(runs: Sequence[RunHistory]) -> Figure:
    """Return a figure of step times: over the steps of one run, or as one mean per run."""
    is_one = len(runs) == 1
    steps = {run.label: run.of("step") for run in runs if run.of("step")}
    series: list[Series] = []
    top = None
    if is_one and steps:
        [found] = steps.values()
        # The means in the first record also hold for the steps from 0 to this record.
        rows = _thin([{**found[0], "step": 0}, *found])
        series = [*_parts("area", [row["step"] for row in rows], rows), *_marks(runs)]
        top = _top([1e3 * sum(row[name] for name in TIMES) for row in rows])
    elif steps:
        series = _parts("bars", list(steps), [r.mean_times for r in runs if r.label in steps])
    return Figure(
        name="time",
        title="Time of a step by phase",
        x_label="step" if is_one else "",
        y_label="milliseconds",
        note="Means over ranks. Exposed communication did not overlap with computation."
        + (_CUT if top else ""),
        series=series,
        is_stacked=True,
        top=top,
    )


def _ranks(runs: Sequence[RunHistory]) -> Iterator[Figure]:
    """Yield one figure per run, with the step times of the slowest ranks of the run."""
    for number, run in enumerate(runs):
        ranks = sorted(run.view.ranks, key=lambda rank: -rank.work_s)[:MAX_RANKS]
        rows = [{name: getattr(rank, name) for name in _TIMES} for rank in ranks]
        yield Figure(
            name=f"ranks-{number}",
            title="Last steps by rank" + (f", {run.label}" if len(runs) > 1 else ""),
            y_label="milliseconds",
            note=f"The slowest {len(ranks)} of {len(run.view.ranks)} ranks; others wait for them.",
            series=_parts("bars", [f"rank {rank.rank}" for rank in ranks], rows),
            is_stacked=True,
        )


def _parts(kind: Kind, x: list[Any], rows: Sequence[Record]) -> list[Series]:
    """Return one series per phase of a step, in milliseconds."""
    return [
        Series(name=title, kind=kind, colour=n, x=x, y=[1e3 * row[name] for row in rows])
        for n, (name, title) in zip((0, 1, 3), _TIMES.items(), strict=True)
    ]
