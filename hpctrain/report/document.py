"""Documents of text, tables and figures, written as Markdown, as LaTeX and as PDF."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any

from hpctrain.core.atomic import explained_writes, make_folder, publishing
from hpctrain.report.drawing import canvases, draw_page
from hpctrain.report.figure import Figure, shown
from hpctrain.report.page import Cell

MAX_CODE = 1000  # characters of a line of a listing
MAX_CELL = 160  # characters of a line in a cell; the PDF breaks the line into up to 4 lines
_NO_BREAK = "\N{NO-BREAK SPACE}"
_LATEX_CHARS = 88  # characters of a table line in LaTeX, with a space after each column

_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # LaTeX would read a bracket after ``\\`` as an argument
    "\N{EN DASH}": "--",
    "\N{HORIZONTAL ELLIPSIS}": r"\dots{}",
    "\N{REPLACEMENT CHARACTER}": "?",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Table of a document: the heads of the columns, and the cells of each row."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def texts(self) -> list[list[str]]:
        """Return the text of each cell."""
        return [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in self.rows]


@dataclass(frozen=True)
class Listing:
    """Text of a script or a command; its line breaks are kept."""

    text: str


Block = str | Table | Listing
"""A paragraph, a table or a listing."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Title and blocks of a section."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Document:
    """Title, sections, and pages of figures; the figures of a page are drawn side by side."""

    title: str
    sections: Sequence[Section]
    pages: Sequence[Sequence[Figure]]
    about: str  # lines above each figure: machine, model, versions and date

    def markdown(self, images: Sequence[str]) -> str:
        """Return the document as Markdown; ``images`` has the path of one image per page."""
        lines = [f"# {_line(self.title)}"]
        for section in self.sections:
            lines += ["", f"## {_line(section.title)}"]
            for block in section.blocks:
                lines += ["", *_markdown(block)]
        lines += ["", "## Figures"] if self.pages else []
        for page, image in zip(self.pages, images, strict=True):
            title = ", ".join(figure.title for figure in page)
            lines += ["", f"![{_line(title)}]({image})", "", f"*{_line(page[0].note)}*"]
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        r"""Return the tables as LaTeX, to be read with ``\input``; no LaTeX package is needed."""
        found = []
        for section in self.sections:
            found += [_latex(block) for block in section.blocks if isinstance(block, Table)]
        return "\n".join(found)

    def write_pdf(self, path: Path) -> None:
        """Write the document as PDF: first text and tables, then the pages of figures.

        Raises:
            ConfigError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        with canvases() as new_canvas:
            from matplotlib.backends.backend_pdf import PdfPages  # noqa: PLC0415 - optional

            with PdfPages(path, metadata={"Title": _line(self.title)}) as pages:
                for canvas in _Layout(new_canvas).pages_of(self):
                    pages.savefig(canvas)
                for page in self.pages:
                    pages.savefig(draw_page(new_canvas(figsize=(11.7, 8.3)), page, self.about))


def write_documents(document: Document, folder: Path, name: str) -> list[Path]:
    """Write a document as NAME.md, NAME.tex and NAME.pdf; return the paths.

    The pages of figures are written as ``plots/NAME-N.png``, to which the Markdown refers.

    Raises:
        ConfigError: matplotlib is not installed, or a file cannot be written.
    """
    texts, pdf = [folder / f"{name}.{suffix}" for suffix in ("md", "tex")], folder / f"{name}.pdf"
    with explained_writes("the report", folder, "name another folder with --out"):
        make_folder(folder / "plots")
        images = [f"plots/{name}-{number + 1}.png" for number in range(len(document.pages))]
        with canvases() as new_canvas:
            for page, image in zip(document.pages, images, strict=True):
                canvas = new_canvas(figsize=(11.7, 8.3))
                draw_page(canvas, page, document.about).savefig(folder / image, dpi=120)
        for path, text in zip(texts, (document.markdown(images), document.latex()), strict=True):
            with publishing(path) as part:
                part.write_text(text, encoding="utf-8", errors="replace")
        with publishing(pdf) as part:
            document.write_pdf(part)
    return [*texts, pdf]


def _line(text: str, width: int = MAX_CODE) -> str:
    return shown(" ".join(text.split()), width)


def _markdown(block: Block) -> list[str]:
    if isinstance(block, Listing):
        return ["```", *(shown(line, MAX_CODE) for line in block.text.splitlines()), "```"]
    if isinstance(block, str):
        return [_line(block)]
    rows = [[_line(cell).replace("|", "\\|") for cell in row] for row in block.texts()]
    head = [_line(each).replace("|", "\\|") for each in block.heads]
    lines = [" | ".join(row) for row in (head, ["---:"] * len(head), *rows)]
    return [f"**{_line(block.title)}**", "", *(f"| {line} |" for line in lines)]


def _latex(table: Table) -> str:
    rows = [table.heads, *table.texts()]
    cells: list[list[list[str]]] = []
    for width in range(_LATEX_CHARS, 7, -1):  # the widest columns with which the table fits
        cells = [[_cell_lines(cell, width) for cell in row] for row in rows]
        longest = [max(map(len, chain(*column))) for column in zip_longest(*cells, fillvalue=[""])]
        if sum(longest) + len(longest) <= _LATEX_CHARS:
            break
    texts = [[_stacked([_escaped(line) for line in cell]) for cell in row] for row in cells]
    head, *body = [f"  {' & '.join(row)} \\\\" for row in texts]
    columns = "r" * len(table.heads)
    return "\n".join(
        [
            "\\begin{table}",
            f"\\caption{{{_escaped(table.title)}}}",
            "\\centering\\scriptsize\\setlength{\\tabcolsep}{2pt}",
            f"\\begin{{tabular}}{{{columns}}}",
            *("  \\hline", head, "  \\hline", *body, "  \\hline"),
            "\\end{tabular}",
            "\\end{table}\n",
        ]
    )


def _stacked(lines: Sequence[str]) -> str:
    text = r" \\ ".join(lines)
    form = r"\begin{{tabular}}[t]{{@{{}}r@{{}}}}{}\end{{tabular}}"
    return text if len(lines) == 1 else form.format(text)


def _escaped(text: str) -> str:
    return re.sub(r"[^\w\s]|_", lambda mark: _LATEX.get(mark[0], mark[0]), _line(text))


class _Layout:
    """Places text and tables on upright pages of A4.

    matplotlib does not lay out paragraphs. Lines are therefore broken after a number of
    characters, and columns are placed by the exact widths of their texts.
    """

    WIDTH, HEIGHT, MARGIN = 8.27, 11.69, 0.75  # inches
    SIZE, SMALL = 9.0, 7.5  # points of paragraphs and of tables
    LEADING = 1.35
    PER_LINE = 102  # characters of a line of a paragraph

    def __init__(self, new_canvas: Any) -> None:
        self._new_canvas = new_canvas
        self._pages: list[Any] = []
        self._y = 0.0  # position of the last line, in inches above the lower edge of the page

    def pages_of(self, document: Document) -> list[Any]:
        """Return the pages with the text of a document."""
        self._break()
        for line in _wrapped(_line(document.title), 62):
            self._text(line, 15, weight="bold")
        for section in document.sections:
            self._skip(0.12)
            self._reserve(1.6)  # avoids a title at the end of a page, or a divided short script
            self._text(_line(section.title), 11, weight="bold")
            for block in section.blocks:
                self._skip(0.06)
                if isinstance(block, Table):
                    self._table(block)
                elif isinstance(block, Listing):
                    for line in block.text.splitlines():
                        parts = wrap(shown(line, MAX_CODE), 95, subsequent_indent="    ")
                        for part in " \\\n".join(parts).split("\n"):
                            self._text(part, self.SMALL, family="monospace")
                else:
                    for line in _wrapped(_line(block, 10 * MAX_CODE), self.PER_LINE):
                        self._text(line, self.SIZE)
        return self._pages

    def _break(self) -> None:
        self._pages.append(self._new_canvas(figsize=(self.WIDTH, self.HEIGHT)))
        self._y = self.HEIGHT - self.MARGIN

    def _skip(self, inches: float) -> None:
        self._y -= inches

    def _reserve(self, inches: float) -> None:
        if self._y - inches < self.MARGIN:
            self._break()

    def _text(self, text: str, size: float, **look: Any) -> None:
        height = size * self.LEADING / 72
        self._reserve(height)
        self._y -= height
        self._put(text, self.MARGIN, size, **look)

    def _put(self, text: str, x: float, size: float, up: float = 0.0, **look: Any) -> None:
        y = self._y + up
        self._pages[-1].text(x / self.WIDTH, y / self.HEIGHT, text, fontsize=size, **look)

    def _table(self, table: Table) -> None:
        """Draw a table with right-aligned cells, and rules at the top, end and below the heads."""
        room = self.WIDTH - 2 * self.MARGIN
        rows = [[_cell_lines(cell) for cell in row] for row in (table.heads, *table.texts())]
        size, widths = self.SMALL, _widths(rows, self.SMALL)
        gap = 0.14
        if (total := sum(widths) + gap * len(widths)) > room:
            size, gap = size * room / total, gap * room / total
            widths = _widths(rows, size)
        gap = min(0.35, (room - sum(widths)) / len(widths))
        line = size * self.LEADING / 72
        title = _wrapped(_line(table.title), self.PER_LINE)
        self._reserve((len(title) + 6) * line)
        for each in title:
            self._text(each, self.SIZE - 0.5, style="italic")
        self._skip(0.06)
        edge = self.MARGIN + sum(widths) + gap * len(widths)
        self._rule(edge, 0.8)
        for number, row in enumerate(rows):
            height = line * max(map(len, row)) + 0.03
            self._reserve(height)
            self._y -= height
            right = self.MARGIN
            for lines, width in zip(row, widths, strict=True):
                right += width + gap
                for place, each in enumerate(lines):
                    up = height - line * (place + 1) + 0.02
                    self._put(each, right, size, up, ha="right")
            if number in (0, len(rows) - 1):
                self._rule(edge, 0.5 if number == 0 else 0.8)
        self._skip(0.05)

    def _rule(self, right: float, width: float) -> None:
        from matplotlib.lines import Line2D  # noqa: PLC0415 - an optional package

        x, y = [self.MARGIN / self.WIDTH, right / self.WIDTH], [self._y / self.HEIGHT] * 2
        self._pages[-1].add_artist(Line2D(x, y, linewidth=width, color="black"))


def _wrapped(text: str, width: int) -> list[str]:
    return wrap(text, width, break_on_hyphens=False)


def _cell_lines(cell: str, width: int = MAX_CELL // 4) -> list[str]:
    found = []
    for line in cell.splitlines():
        # A number and its unit stay together: ``wrap`` breaks lines at plain spaces only.
        kept = re.sub(r"(?<=\d) (?=[^\W\d])", _NO_BREAK, shown(line, MAX_CELL))
        parts = wrap(kept, width, break_long_words=False)
        found += [part.replace(_NO_BREAK, " ") for part in parts]
    return found or [""]


def _widths(rows: Iterable[Sequence[Sequence[str]]], size: float) -> list[float]:
    """Return the width of each column in inches."""
    from matplotlib.textpath import TextPath  # noqa: PLC0415 - an optional package

    def width(text: str) -> float:
        points = TextPath((0, 0), text, size=size).get_extents().width if text.strip() else 0.0
        return float(points) / 72

    columns = zip_longest(*rows, fillvalue=[""])
    return [max(width(line) for cell in column for line in cell) for column in columns]
