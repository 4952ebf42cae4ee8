"""The report of a study: an HTML page, figures as files, and a summary for a terminal."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from hpctrain.core.checks import value_of
from hpctrain.core.keys import keys_of
from hpctrain.core.units import format_bytes, format_seconds
from hpctrain.report.drawing import draw_files
from hpctrain.report.figure import PARTS, Figure, shown
from hpctrain.report.page import (
    Cell,
    figures_html,
    page,
    table,
    text_table,
    value_cell,
    write_page,
)
from hpctrain.studies.checklist import MIN_REPEATS, verdicts
from hpctrain.studies.figures import LEVELS, figures_of
from hpctrain.studies.prediction import VALIDATION_HEADS, Prediction
from hpctrain.studies.study_file import StudyConfig
from hpctrain.studies.study_results import PointSummary, StudyResults

MAX_TEXT = 400  # characters of a table cell; longer texts are shown below the table

POINT_HEADS = (
    *("point", "step", "samples/s", "speed-up", "efficiency", "slow steps"),
    *PARTS.values(),
    *LEVELS.values(),
    *("time to target", "without extremes", "reached", "measured"),
)
_NUM_SHOWN = 5  # a terminal shows only the first columns of the table of points

_KEPT, _MISSING = ("\N{CHECK MARK} kept", 1), ("\N{BALLOT X} missing", 0)

_METHOD = (
    "A step lasts as long as on its slowest rank. The time of a repeat is the mean of its steps "
    "after {warm_up} warm-up steps, and its rate is all samples divided by all seconds. The value "
    "of a point is the median over its repeats, with an interval from the sign test. Efficiency "
    "compares this median with the median of the smallest point that belongs to the same curve "
    "and has a core for each rank; the interval is from the rank-sum test. Both tests assume no "
    "distribution. An interval contains the true value with a confidence of 95 %, or with the "
    "confidence in the table. The column of slow steps has the time that 5 % of all steps exceed. "
    "Time to target is the median over the repeats if all repeats reached the target. The column "
    "without extremes has the mean without the best and the worst repeat, as in MLPerf HPC."
)


def write_report(results: StudyResults, directory: Path) -> list[Path]:
    """Write ``report.html`` and the figures in ``plots/`` into a directory; return all paths.

    Raises:
        ConfigError: plotly or matplotlib is not installed, or a file cannot be written.
    """
    figures = figures_of(results)
    written = write_page(directory / "report.html", study_page(results, figures))
    return [written, *draw_files(figures, directory / "plots", results.caption)]


def study_page(results: StudyResults, figures: list[Figure]) -> str:
    """Return the HTML page of a study. Raises ``ConfigError`` if plotly is not installed."""
    judged = verdicts(results)
    kept = sum(not verdict.fault for verdict in judged)
    cards = [*_cards(results), (f"{kept} of {len(judged)}", "rules of the checklist are kept")]
    checks: list[list[Cell]] = [
        [_MISSING if each.fault else _KEPT, each.rule, each.advice, each.source] for each in judged
    ]
    failures: list[list[Cell]] = [
        [results.label(each.point), (str(each.repeat), each.repeat), each.folder, each.error or ""]
        for each in results.failed
    ]
    points = [point_cells(results, each) for each in results.summaries]
    study = results.config.study
    parts = [
        f'<p class="soft">{escape(results.headline)}</p>',
        '<div class="cards">',
        *(f"<div><b>{escape(value)}</b>{escape(text)}</div>" for value, text in cards),
        "</div>",
        figures_html(figures) if figures else '<p class="missing">Nothing was measured.</p>',
        "<h2>Points</h2>",
        table("points", POINT_HEADS, points),
        *(f'<p class="missing">{escape(each)}</p>' for each in results.remarks),
        f'<p class="soft">{_METHOD.format(warm_up=study.warm_up)}</p>',
        *_prediction(results),
        "<h2>Points that failed</h2>" if failures else "",
        table("failed", ("point", "repeat", "folder", "error"), failures) if failures else "",
        "<h2>Checklist</h2>",
        table("checklist", ("state", "rule", "fault and remedy", "source"), checks),
        "<h2>Command and environment</h2>",
        _setup(results),
    ]
    return page(shown(study.name), parts, figures)


def _prediction(results: StudyResults) -> Iterator[str]:
    """Yield the HTML of the predictions for larger sizes, and of their validation."""
    found = Prediction.of(results)
    if found.forecasts:
        yield "<h2>Prediction</h2>"
        yield table("predicted", found.forecast_heads, found.forecast_rows)
        yield "<h3>Validation on measured sizes</h3>"
        yield table("validation", VALIDATION_HEADS, found.validation_rows)
        yield f'<p class="soft">{escape(found.text)}</p>'


def summary_of(results: StudyResults) -> RenderableType:
    """Return the text of the summary for a terminal."""
    judged = verdicts(results)
    missing = [each for each in judged if each.fault]
    lines = [
        *(
            f"failed: {results.label(each.point)}, repeat {each.repeat}: {shown(each.error)}"
            for each in results.failed
        ),
        f"checklist: {len(judged) - len(missing)} of {len(judged)} rules are kept",
        *(f"attention: {each}" for each in results.remarks),
        *(f"missing: {each.rule} ({each.source}): {each.advice}" for each in missing),
    ]
    cells = [point_cells(results, each)[:_NUM_SHOWN] for each in results.summaries]
    points = text_table(POINT_HEADS[:_NUM_SHOWN], cells) if results.done else "nothing measured"
    return Group(Text(results.headline), points, *map(Text, lines))


def point_cells(results: StudyResults, summary: PointSummary) -> list[Cell]:
    """Return the cells of a point, in the order of ``POINT_HEADS``."""
    mark = "\n(more ranks than cores)" if summary.oversubscribed else ""
    steps = [seconds for record in summary.done for seconds in record.step_s]
    slow_s = float(np.quantile(steps, 0.95)) if steps else None
    score_s = _without_extremes([each.time_to_target_s for each in summary.done])
    parts = [found and found.value for found in map(summary.median_of, PARTS)]
    return [
        results.label(summary.point) + mark,
        value_cell(summary.step_s, format_seconds),
        value_cell(summary.samples_per_s, "{:.4g}".format),
        value_cell(summary.speed_up, "{:.2f}".format),
        value_cell(summary.efficiency, "{:.1%}".format),
        value_cell(slow_s, format_seconds),
        *(value_cell(part, format_seconds) for part in parts),
        *(value_cell(summary.median_of(name), format_bytes) for name in LEVELS),
        value_cell(summary.median_of("time_to_target_s"), format_seconds),
        value_cell(score_s, format_seconds),
        value_cell(summary.median_of("metric"), "{:.4g}".format),
        (f"{len(summary.done)} of {len(summary.records)}", len(summary.done)),
    ]


def _without_extremes(times: Sequence[float | None]) -> float | None:
    reached = sorted(seconds for seconds in times if seconds is not None)
    is_enough = len(reached) == len(times) >= MIN_REPEATS
    return sum(reached[1:-1]) / (len(reached) - 2) if is_enough else None


def _cards(results: StudyResults) -> list[tuple[str, str]]:
    fit = [each for each in results.own.summaries if each.efficiency and each.samples_per_s]
    if not fit:
        return []
    last = max(fit, key=lambda each: (each.ranks, each.efficiency and each.efficiency.value))
    assert last.efficiency is not None
    assert last.samples_per_s is not None
    where = results.label(last.point)
    return [
        (f"{last.efficiency.value:.1%}", f"efficiency at {where}"),
        (f"{last.samples_per_s.value:.4g}", f"samples per second at {where}"),
    ]


def _setup(results: StudyResults) -> str:
    config = results.config
    found: dict[str, Any] = {name: value_of(config, name) for name in keys_of(StudyConfig)}
    found |= results.environment or {}
    texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in found.items()}
    rows = [[name, text] for name, text in texts.items() if len(text) < MAX_TEXT]
    details = [
        f"<details><summary>{name}</summary><pre>"
        f"{escape(json.dumps(found[name], indent=2))}</pre></details>"
        for name, text in texts.items()
        if len(text) >= MAX_TEXT
    ]
    return "\n".join([table("setup", ("name", "value"), rows), *details])
