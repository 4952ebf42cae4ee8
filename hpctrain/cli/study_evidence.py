"""Commands of ``hpctrain study`` that add evidence to a measured study."""

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import argument, option, plural
from hpctrain.studies import imported as imports
from hpctrain.studies.study_results import StudyResults

Folder = Annotated[Path, argument("DIR", "Directory of a study.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands to ``hpctrain study``."""
    app.command("import")(import_results)


def import_results(
    directory: Folder,
    path: Path = argument("FILE.csv", "Results as CSV."),
    *,
    name: str = option("", "TOOL", "Name of the tool.", shown="name of the file"),
) -> None:
    """Add results of another tool to the figures and tables of a study.

    The first line of FILE.csv names the columns nodes, ranks and seconds, the time of a step. Each
    other line is a repeat of a point. The column samples, the samples of all ranks in a step, may
    be omitted if the study has a batch. Factors of the study with several values need a column.

    The results must be measured on the machine of the study, without the first steps, on the
    slowest rank. Importing again replaces the results of the same name.

    Examples:
      hpctrain study import studies/digits-strong ddp.csv --name DDP
    """
    results = StudyResults.read(directory)
    tool = name or path.stem
    num_rows = imports.import_file(results.folder, results.config, path, tool)
    typer.echo(
        f"imported {plural(num_rows, 'repeat')} of {tool}; `hpctrain study report {directory}` "
        f"shows them"
    )
