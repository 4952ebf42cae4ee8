"""Pages of studies and comparisons: each one HTML file, which needs no network."""

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from hashlib import sha256
from html import escape
from importlib import resources
from string import Template
from typing import Any

import numpy as np

from hpctrain.core.units import format_bytes, format_seconds
from hpctrain.studies.checklist import MIN_REPEATS, Verdict
from hpctrain.studies.drawing import COLOURS, missing
from hpctrain.studies.figures import LEVELS, PARTS, Figure
from hpctrain.studies.results import StudyResults, shown
from hpctrain.studies.statistics import Estimate, PointSummary

NOTHING = "\N{EN DASH}"

MAX_TEXT = 400  # characters of a cell; more can be folded out

Cell = str | tuple[str, float]
"""What a cell shows, and the number by which it is sorted."""

POINT_HEADS = (
    *("point", "step", "samples/s", "efficiency", "slow steps"),
    *PARTS.values(),
    *LEVELS.values(),
    *("time to target", "without extremes", "measured"),
)

_KEPT, _MISSING = ("\N{CHECK MARK} kept", 1), ("\N{BALLOT X} missing", 0)

_METHOD = (
    "A step lasts as long as on its slowest rank. Of each repeat counts the mean of its steps "
    "after warm-up, of a point the median over repeats. Rates are harmonic means over repeats. "
    "Intervals are 95 % percentiles of a bootstrap over repeats. Efficiency is the ratio of "
    "medians to the smallest point of the curve that has a core for each rank. 95 % of all steps "
    "are faster than slow steps. Time to target is a median, only where every repeat reached it; "
    "without extremes it is the mean without the best and the worst repeat, as MLPerf HPC scores."
)


def study_page(results: StudyResults, verdicts: list[Verdict], figures: list[Figure]) -> str:
    """Return the page of a study. Raises ``ConfigError``: plotly is not installed."""
    facts = results.facts
    kept = sum(not verdict.fault for verdict in verdicts)
    cards = [*_cards(results), (f"{kept} of {len(verdicts)}", "rules of the checklist are kept")]
    checks: list[list[Cell]] = [
        [_MISSING if each.fault else _KEPT, each.rule, each.advice, each.source]
        for each in verdicts
    ]
    failures: list[list[Cell]] = [
        [results.label(each.point), (str(each.repeat), each.repeat), each.folder, each.error or ""]
        for each in results.failed
    ]
    parts = [
        f'<p class="soft">{escape(results.headline)}</p>',
        '<div class="cards">',
        *(f"<div><b>{escape(value)}</b>{escape(text)}</div>" for value, text in cards),
        "</div>",
        figures_html(figures) if figures else '<p class="missing">Nothing was measured.</p>',
        "<h2>Points</h2>",
        table("points", POINT_HEADS, [point_cells(results, each) for each in results.summaries]),
        f'<p class="soft">{_METHOD}</p>',
        "<h2>Points that failed</h2>" if failures else "",
        table("failed", ("point", "repeat", "folder", "error"), failures) if failures else "",
        "<h2>Checklist</h2>",
        table("checklist", ("state", "rule", "what is missing, and what to do", "source"), checks),
        "<h2>What was run, and how</h2>",
        _setup(results),
    ]
    return page(shown(facts.name), parts, figures)


def page(title: str, parts: Iterable[str], figures: list[Figure]) -> str:
    """Return a whole page of parts in HTML, in which all that users name is escaped.

    Raises ``ConfigError``: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415
    except ImportError:
        raise missing("plotly") from None
    folder = resources.files("hpctrain.studies") / "templates"
    template, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("report.html", "report.js")
    )
    plotly = str(get_plotlyjs())
    # A browser runs these two scripts and no other, whatever stands in names and errors.
    digests = [b64encode(sha256(each.encode()).digest()).decode() for each in (plotly, script)]
    drawn = {"colours": COLOURS, "figures": [asdict(figure) for figure in figures]}
    return Template(template).substitute(
        title=escape(title),
        body="\n".join(filter(None, parts)),
        figures=json.dumps(drawn).replace("<", "\\u003c"),
        plotly=plotly,
        script=script,
        hashes=" ".join(f"'sha256-{digest}'" for digest in digests),
    )


def figures_html(figures: list[Figure]) -> str:
    """Return places for figures, with their titles and what is to be seen."""
    found = [
        f'<figure><h3>{escape(figure.title)}</h3><div class="plot" id="{figure.name}"></div>'
        f"<figcaption>{escape(figure.note)}</figcaption></figure>"
        for figure in figures
    ]
    return "\n".join(['<div class="figures">', *found, "</div>"])


def table(name: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table that sorts by a click on a head; ``name`` is its id."""
    head = "".join(f'<th><button type="button">{escape(each)}</button></th>' for each in heads)
    lines = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="wide"><table id="{name}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    return f'<td data-v="{cell[1]!r}">{escape(cell[0])}</td>'


def point_cells(results: StudyResults, summary: PointSummary) -> list[Cell]:
    """Return what is known of a point, in the order of ``POINT_HEADS``."""
    repeats = results.repeats(summary.point)
    mark = "\n(more ranks than cores)" if summary.oversubscribed else ""
    steps = [seconds for record in repeats for seconds in record.step_s]
    tried = summary.num_done + summary.num_failed
    return [
        results.label(summary.point) + mark,
        estimate_cell(summary.step_s, format_seconds),
        estimate_cell(summary.samples_per_s, "{:.4g}".format),
        estimate_cell(summary.efficiency, "{:.1%}".format),
        _told(float(np.quantile(steps, 0.95)) if steps else None, format_seconds),
        *(_told(summary.breakdown_s.get(part), format_seconds) for part in PARTS),
        *(estimate_cell(results.median_of(summary.point, name), format_bytes) for name in LEVELS),
        estimate_cell(results.median_of(summary.point, "time_to_target_s"), format_seconds),
        _told(_without_extremes([each.time_to_target_s for each in repeats]), format_seconds),
        (f"{summary.num_done} of {tried}", summary.num_done),
    ]


def estimate_cell(estimate: Estimate | None, form: Callable[[float], str]) -> Cell:
    """Return a value with its interval."""
    if estimate is None:
        return NOTHING
    ends = [form(end) for end in (estimate.low, estimate.high) if end is not None]
    interval = f"\n[{', '.join(ends)}]" if len(set(ends)) > 1 else ""
    return f"{form(estimate.value)}{interval}", estimate.value


def _told(value: float | None, form: Callable[[float], str]) -> Cell:
    return NOTHING if value is None else (form(value), value)


def _without_extremes(times: Sequence[float | None]) -> float | None:
    told = sorted(seconds for seconds in times if seconds is not None)
    is_enough = len(told) == len(times) >= MIN_REPEATS
    return sum(told[1:-1]) / (len(told) - 2) if is_enough else None


def _cards(results: StudyResults) -> list[tuple[str, str]]:
    fit = [
        (each.ranks, each.efficiency.value, each) for each in results.summaries if each.efficiency
    ]
    if not fit:
        return []
    ranks, efficiency, last = max(fit, key=lambda found: found[:2])
    rate = estimate_cell(last.samples_per_s, "{:.4g}".format)
    return [
        (f"{efficiency:.1%}", f"efficiency on {ranks} ranks"),
        (rate[0].partition("\n")[0], f"samples per second on {ranks} ranks"),
    ]


def _setup(results: StudyResults) -> str:
    found: dict[str, Any] = asdict(results.facts)
    found["cores of a node"] = found.pop("cores")
    if results.environment:
        found |= asdict(results.environment)
    texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in found.items()}
    rows = [[name, text] for name, text in texts.items() if len(text) < MAX_TEXT]
    details = [
        f"<details><summary>{name}</summary><pre>"
        f"{escape(json.dumps(found[name], indent=2))}</pre></details>"
        for name, text in texts.items()
        if len(text) >= MAX_TEXT
    ]
    return "\n".join([table("setup", ("what", "value"), rows), *details])
