"""Commands of ``hpctrain study`` that add evidence to a measured study."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from hpctrain.cli import study_bar
from hpctrain.cli.options import FAILED, argument, option
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import plural
from hpctrain.report.page import text_table
from hpctrain.studies import imported as imports
from hpctrain.studies import prediction as predictions
from hpctrain.studies import reproduction, study_archive, study_results, study_run
from hpctrain.studies.study_file import REQUIRED
from hpctrain.train.console import make_console

Folder = Annotated[Path, argument("DIR", "Directory of a study.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands to ``hpctrain study``."""
    app.command("import")(import_results)
    app.command()(predict)
    app.command()(export)
    app.command()(reproduce)


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

    The results must be measured on the machine of the study. The time of a step is that of its
    slowest rank, and the first steps must not count. Importing again replaces the results of the
    same name.

    Examples:
      hpctrain study import studies/digits-strong ddp.csv --name DDP
    """
    results = study_results.StudyResults.read(directory)
    tool = name or path.stem
    num_rows = imports.import_file(results.folder, results.config, path, tool)
    typer.echo(
        f"imported {plural(num_rows, 'repeat')} of {tool}; `hpctrain study report {directory}` "
        f"shows them"
    )


def predict(
    directory: Folder,
    *,
    ranks: list[int] | None = option(
        None,
        "N",
        "Ranks to predict; may be repeated.",
        shown="2 and 4 times the largest measured size",
        min=2,
    ),
    efficiency: float = option(REQUIRED, "E", "Required efficiency.", min=0.01, max=1),
) -> None:
    """Predict step times and efficiency beyond the measured sizes of a study.

    Each size that was measured is first predicted from the smaller ones, and the prediction is
    compared with the measurement. If the interval of a prediction is too wide to decide whether a
    size keeps the required efficiency, the table reports this. `study report` shows both tables.

    Examples:
      hpctrain study predict studies/digits-strong

      hpctrain study predict studies/digits-strong --ranks 16 --ranks 64 --efficiency 0.7
    """
    results = study_results.StudyResults.read(directory)
    found = predictions.Prediction.of(results, ranks=ranks or (), required=efficiency)
    screen = make_console(shown=True)
    screen.print("validation: measured sizes, each predicted from the smaller ones")
    screen.print(text_table(predictions.VALIDATION_HEADS, found.validation_rows))
    screen.print("prediction")
    screen.print(text_table(found.forecast_heads, found.forecast_rows))
    screen.print(Text(found.text))


def export(
    directory: Folder,
    *,
    out: Path | None = option(None, "FILE", "Archive to write.", shown="NAME.tar.gz"),
    add: list[Path] | None = option(
        None, "PATH", "Further file or directory, such as data; may be repeated."
    ),
) -> None:
    """Write an archive from which others can measure a study again.

    The archive contains configuration, environment, plan, raw records and output of each repeat,
    checksums, and the scripts: the files that the command names, and the modules next to them that
    they name or import. Run the command in the directory in which the study was measured. The
    scripts must be unchanged since then.

    Examples:
      hpctrain study export studies/digits-strong

      hpctrain study export studies/digits-strong --add data/small --out digits.tar.gz
    """
    results = study_results.StudyResults.read(directory)
    path = out or Path(f"{results.config.study.name}.tar.gz")
    num_files = study_archive.export(results, path, add or ())
    typer.echo(
        f"wrote {path} with {num_files} files; `hpctrain study reproduce {path}` measures again"
    )


def reproduce(
    archive: Path = argument("ARCHIVE", "Archive of hpctrain study export."),
    *,
    out: Path | None = option(None, "DIR", "Directory to work in.", shown="NAME-reproduced"),
    repeats: int | None = option(None, "N", "Repeats.", shown="as in the study", min=1),
    launcher: str | None = option(
        None, "TEXT", "Launcher of the ranks, as in STUDY.toml.", shown="as in the study"
    ),
    efficiency: float = option(
        REQUIRED, "E", "Required efficiency, with which each size is compared.", min=0.01, max=1
    ),
) -> None:
    """Measure an archived study again, and report whether each conclusion holds.

    After a check of all checksums, the archive is unpacked into DIR/original, the command runs in
    DIR/files, and the results are written into DIR/study. Conclusions concern efficiencies, the
    order of sizes and of variants, and the target; they hold, do not hold, or are undecided within
    the noise of the repeats. The ratios of the step times follow.

    After a kill, the same command continues. The exit code is 1 if a conclusion does not hold.

    Examples:
      hpctrain study reproduce digits-strong.tar.gz

      hpctrain study reproduce digits-strong.tar.gz --launcher "srun -n {ranks} -N {nodes}"
    """
    archive, place = archive.absolute(), _unpacked(archive, out)
    first = study_results.StudyResults.read(place / "original" / study_archive.STUDY)
    config, table = first.config, first.config.study
    if table.cores == (first.environment or {}).get("cores"):  # not set in STUDY.toml, but counted
        table = replace(table, cores=0)
    config = replace(
        config,
        study=table if repeats is None else replace(table, repeats=repeats),
        command=config.command if launcher is None else replace(config.command, launcher=launcher),
    )
    os.chdir(place / study_archive.FILES)
    found = study_run.Study(config, place / study_archive.STUDY)
    found.prepare()
    study_bar.measure(found, found.missing())
    again = study_results.StudyResults.read(found.folder.path)
    compared = reproduction.Reproduction(first, again, efficiency)
    text = compared.summary()
    make_console(shown=True).print(text)
    written = place / "reproduction.txt"
    with written.open("w", encoding="utf-8") as file:
        Console(file=file, width=100, highlight=False, markup=False).print(text)
    typer.echo(f"wrote {written}")
    if not (compared.holds and again.done):
        raise typer.Exit(FAILED)


def _unpacked(archive: Path, out: Path | None) -> Path:
    """Unpack an archive, unless this was done before, and return the absolute directory."""
    contents = study_archive.read(archive)
    name = archive.name.removesuffix(".gz").removesuffix(".tar")
    place = (out or Path(f"{name}-reproduced")).absolute()
    sums = place / "original" / study_archive.SUMS
    if not sums.exists():
        study_archive.unpack(contents, place / "original")
        shutil.copytree(
            place / "original" / study_archive.FILES,
            place / study_archive.FILES,
            dirs_exist_ok=True,
        )
    elif sums.read_bytes() != contents[study_archive.SUMS]:
        raise ConfigError(
            f"a reproduction must have its own directory, but {place} contains that of another "
            f"archive; choose another directory with --out"
        )
    return place
