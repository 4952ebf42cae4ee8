"""The report of a study: a page, figures as files, and a summary for a terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpctrain.core.atomic import make_folder, publishing
from hpctrain.core.errors import ConfigError
from hpctrain.studies.checklist import verdicts
from hpctrain.studies.drawing import draw_files
from hpctrain.studies.figures import figures_of
from hpctrain.studies.page import POINT_HEADS, Cell, point_cells, study_page
from hpctrain.studies.results import StudyResults, shown

PAGE = "report.html"
PLOTS = "plots"  # folder of the figures

_NUM_SHOWN = 4  # columns of points on a terminal


def write_report(results: StudyResults, directory: Path) -> list[Path]:
    """Write the page and the figures of a study into a directory, and return their paths.

    Raises ``ConfigError``: plotly or matplotlib is not installed, or the file system refuses.
    """
    figures = figures_of(results)
    page = write_page(directory / PAGE, study_page(results, verdicts(results), figures))
    return [page, *draw_files(figures, directory / PLOTS)]


def write_page(path: Path, text: str) -> Path:
    """Write a page at once or not at all. Raises ``ConfigError``: the file system refuses."""
    try:
        make_folder(path.parent)
        with publishing(path) as part:
            # Half of a surrogate pair has no UTF-8: a question mark stands for it.
            part.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; name a place that can"
        ) from None
    return path


def summary_of(results: StudyResults) -> RenderableType:
    """Return the report for a terminal."""
    judged = verdicts(results)
    missing = [each for each in judged if each.fault]
    lines = [
        *(
            f"failed: {results.label(each.point)}, repeat {each.repeat}: {shown(each.error)}"
            for each in results.failed
        ),
        f"checklist: {len(judged) - len(missing)} of {len(judged)} rules are kept",
        *(f"missing: {each.rule} ({each.source}): {each.advice}" for each in missing),
    ]
    cells = [point_cells(results, each)[:_NUM_SHOWN] for each in results.summaries]
    points = text_table(POINT_HEADS[:_NUM_SHOWN], cells) if results.done else "nothing measured"
    return Group(Text(results.headline), points, *map(Text, lines))


def text_table(heads: Iterable[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """Return a table of what cells show, for a terminal."""
    found = Table(*heads, box=None, pad_edge=False)
    for row in rows:
        found.add_row(*(Text(cell if isinstance(cell, str) else cell[0]) for cell in row))
    return found
