"""HTML pages and tables that describe and compare runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from hpctrain.core.keys import keys_of
from hpctrain.core.units import format_bytes, format_seconds
from hpctrain.report.figure import shown
from hpctrain.report.page import (
    NOTHING,
    Cell,
    figures_html,
    page,
    table,
    text_table,
    value_cell,
    write_page,
)
from hpctrain.train.history import LOSS, RunHistory, labelled, number
from hpctrain.train.run_config import RunConfig
from hpctrain.train.run_figures import figures_of

_PARTS = ("run", "part", "begins after step", "ranks", "nodes", "job", "the part before")

_SAVINGS = {
    "node_bytes": ("in nodes, a step", format_bytes),
    "rail_bytes": ("between nodes, a step", format_bytes),
    "ratio": ("times less than without compression", "{:.3g}".format),
    "won_s": ("seconds won, a step", "{:.3g}".format),
}

_OF_A_START = ("started", "command", "working_directory", "host")
"""Environment entries that differ between any two runs and do not affect results."""


def write_report(runs: Sequence[RunHistory], path: Path, smooth: int = 0) -> Path:
    """Write an HTML page about runs, and return its path.

    Args:
        runs: one or more runs.
        path: path of the page.
        smooth: as in ``figures_of``.

    Raises:
        ConfigError: plotly is not installed, or the file cannot be written.
    """
    figures = figures_of(runs, smooth)
    configuration = _aligned([run.configuration for run in runs])
    environment = _aligned([run.environment for run in runs])
    labels = [run.label for run in runs]
    parts = [
        *(f'<p class="soft">{escape(text)}</p>' for text in labelled(runs, "headline")),
        *(f'<p class="missing">{escape(text)}</p>' for text in labelled(runs, "warning")),
        figures_html(figures) if figures else '<p class="missing">No step is recorded yet.</p>',
        "<h2>Results</h2>",
        table("results", ("what", *labels), _results(runs)),
        "<h2>Parts</h2>",
        table("parts", _PARTS, [row for run in runs for row in _begins(run)]),
        "<h2>Configuration</h2>",
        f'<p class="soft">What differs from {"run to run" if labels[1:] else "defaults"}.</p>',
        _folded("configuration", labels, configuration, _changed(configuration)),
        "<h2>Environment</h2>",
        _folded("environment", labels, environment, _different(environment)),
    ]
    return write_page(path, page(", ".join(run.title for run in runs), parts, figures))


def comparison(runs: Sequence[RunHistory]) -> RenderableType:
    """Return tables of the differences between runs, for a terminal."""
    labels = [run.label for run in runs]
    found: list[RenderableType] = [text_table(("results", *labels), _results(runs))]
    for name in ("configuration", "environment"):
        values = _aligned([getattr(run, name) for run in runs])
        names = [n for n in _different(values) if n not in _OF_A_START]
        rows = [[n, *map(_text, values[n])] for n in names]
        same = Text(f"{name}: the same")
        found += [Text(), text_table((name, *labels), rows) if rows else same]
    return Group(*found)


def overview(runs: Sequence[RunHistory]) -> RenderableType:
    """Return a table with state and results of each run, one row per run, for a terminal."""
    heads = ("run", "state", "step", "loss", "metric", "ranks", "started")
    rows: list[list[Cell]] = []
    for run in runs:
        test, begun = run.test or run.last("test"), run.view.begun
        step = f"{run.view.step} of {begun.get('num_steps', '?')}"
        loss = number(run.last("step")["loss"]) if run.last("step") else NOTHING
        metric = f"{run.metric_name} {number(test.get('metric'))}" if test else NOTHING
        metric = metric if run.test or not test else f"validation {metric}"
        started = str(run.environment.get("started", NOTHING)).partition("+")[0].replace("T", " ")
        ranks = str(begun.get("world_size", NOTHING))
        rows.append([run.label, run.state, step, loss, metric, ranks, started])
    return text_table(heads, rows)


def _validation(runs: Sequence[RunHistory]) -> Iterator[list[Cell]]:
    """Yield rows of results on held-out training samples."""
    found: list[dict[str, float | None]] = [
        run.metrics_of(run.last("test")) if run.tested == "validation" else {} for run in runs
    ]
    for name in dict.fromkeys(name for each in found for name in each):
        yield [
            f"validation {name}",
            *(value_cell(each.get(name), "{:.4f}".format) for each in found),
        ]


def _results(runs: Sequence[RunHistory]) -> list[list[Cell]]:
    """Return a table of results, with one column per run."""
    tests = [run.test for run in runs]
    metrics = [run.metrics_of(test) if test else {} for run, test in zip(runs, tests, strict=True)]
    rows: list[list[Cell]] = [
        ["state", *(run.state for run in runs)],
        ["steps", *(str(run.view.step) for run in runs)],
        ["ranks", *(str(run.view.begun.get("world_size", NOTHING)) for run in runs)],
        ["nodes", *(str(run.view.begun.get("nodes", NOTHING)) for run in runs)],
        [
            "training loss",
            *(value_cell(run.last("step").get(LOSS), "{:.4f}".format) for run in runs),
        ],
        ["test loss", *(value_cell(test.get(LOSS), "{:.4f}".format) for test in tests)],
        *(
            [f"test {name}", *(value_cell(each.get(name), "{:.4f}".format) for each in metrics)]
            for name in dict.fromkeys(name for each in metrics for name in each)
        ),
        *_validation(runs),
        ["samples/s", *(value_cell(run.samples_per_s, "{:.4g}".format) for run in runs)],
        ["training", *(value_cell(run.training_s, format_seconds) for run in runs)],
    ]
    for name, (title, form) in _SAVINGS.items():
        if any(run.savings for run in runs):
            rows.append([title, *(value_cell(run.savings.get(name), form) for run in runs)])
    return rows


def _begins(run: RunHistory) -> list[list[Cell]]:
    found: list[list[Cell]] = []
    for record in run.records:
        if record["event"] in ("started", "resumed"):
            names = ("part", "step", "world_size", "nodes", "job", "ended_by")
            found.append([run.label, *(_text(record.get(name)) for name in names)])
    return found


def _aligned(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return, for each name, its values in all tables; None for a table without the name."""
    names = dict.fromkeys(name for each in tables for name in each)
    return {name: [each.get(name) for each in tables] for name in names}


def _different(values: Mapping[str, list[Any]]) -> list[str]:
    """Return the names whose values differ between tables; with one table, all names."""
    return [n for n, each in values.items() if len(each) == 1 or len({*map(repr, each)}) > 1]


def _changed(configuration: Mapping[str, list[Any]]) -> list[str]:
    """Return the keys whose values differ between runs or, for one run, from the defaults."""
    defaults = {name: [key.default] for name, key in keys_of(RunConfig).items()}
    return [n for n in _different(configuration) if configuration[n] != defaults.get(n)]


def _folded(
    name: str, labels: Sequence[str], values: Mapping[str, list[Any]], first: Sequence[str]
) -> str:
    """Return HTML: a table of the keys in ``first``, then a collapsed table of all keys."""
    rows = {key: [shown(key), *map(_text, each)] for key, each in values.items()}
    heads = ("key", *labels)
    most = table(name, heads, [rows[key] for key in first]) if first else "<p>No difference.</p>"
    if len(first) == len(rows):
        return most
    every = table(f"{name}-all", heads, rows.values())
    return f"{most}\n<details><summary>all {len(rows)}</summary>{every}</details>"


def _text(value: Any) -> str:
    if value is None or value == "":
        return NOTHING
    return value if isinstance(value, str) else json.dumps(value)
