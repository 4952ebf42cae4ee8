"""HTML pages, and tables for HTML and for a terminal, of runs, studies and comparisons."""

import json
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from hashlib import sha256
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from rich.table import Table
from rich.text import Text

from hpctrain.core.atomic import explained_writes, make_folder, publishing
from hpctrain.report.drawing import COLOURS, missing
from hpctrain.report.figure import Estimate, Figure

NOTHING = "\N{EN DASH}"

Cell = str | tuple[str, float]
"""Text of a cell, or text and the number by which the table sorts the cell."""


def page(title: str, parts: Iterable[str], figures: list[Figure]) -> str:
    """Return an HTML page that consists of the HTML fragments ``parts`` and draws ``figures``.

    The caller must escape names in the fragments.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - an optional package
    except ImportError:
        raise missing("plotly") from None
    folder = resources.files("hpctrain.report") / "templates"
    template, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("report.html", "report.js")
    )
    plotly = str(get_plotlyjs())
    # With these digests a browser runs only the two scripts, even if a name contains a script.
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


def write_page(path: Path, text: str) -> Path:
    """Write a page atomically. Raises ``ConfigError`` if the file cannot be written."""
    with explained_writes("the page", path, "name another file with --out"):
        make_folder(path.parent)
        with publishing(path) as part:
            # Half of a surrogate pair cannot be encoded, and is replaced by a question mark.
            part.write_text(text, encoding="utf-8", errors="replace")
    return path


def figures_html(figures: list[Figure]) -> str:
    """Return HTML elements for figures, with titles and captions."""
    found = [
        f'<figure><h3>{escape(figure.title)}</h3><div class="plot" id="{figure.name}"></div>'
        f"<figcaption>{escape(figure.note)}{_warning(figure)}</figcaption></figure>"
        for figure in figures
    ]
    return "\n".join(['<div class="figures">', *found, "</div>"])


def table(name: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return an HTML table with the id ``name``; a click on a column head sorts the rows."""
    head = "".join(f'<th><button type="button">{escape(each)}</button></th>' for each in heads)
    lines = "\n".join(f"<tr>{''.join(map(_html, row))}</tr>" for row in rows)
    return (
        f'<div class="wide"><table id="{name}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody></table></div>"
    )


def text_table(heads: Iterable[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """Return a table for a terminal."""
    found = Table(*heads, box=None, pad_edge=False)
    for row in rows:
        found.add_row(*(Text(cell if isinstance(cell, str) else cell[0]) for cell in row))
    return found


def value_cell(value: Estimate | float | None, form: Callable[[float], str]) -> Cell:
    """Return a cell with a value and its interval.

    If the interval has less confidence than requested, the cell also shows the confidence, rounded
    down.
    """
    if value is None:
        return NOTHING
    if not isinstance(value, Estimate):
        return form(value), value
    ends = [form(end) for end in (value.low, value.high) if end is not None]
    less = f" {math.floor(1000 * value.confidence) / 10:g}%" if value.falls_short else ""
    interval = f"\n[{', '.join(ends)}]{less}" if len(set(ends)) > 1 else ""
    return f"{form(value.value)}{interval}", value.value


def _warning(figure: Figure) -> str:
    return f' <span class="missing">{escape(figure.warning)}</span>' if figure.warning else ""


def _html(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    return f'<td data-v="{cell[1]!r}">{escape(cell[0])}</td>'
