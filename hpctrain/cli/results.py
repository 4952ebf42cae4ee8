"""``hpctrain plot``, ``report``, ``compare`` and ``runs``: show the results of runs."""

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import argument, option
from hpctrain.core.errors import ConfigError
from hpctrain.train import console, history, run_directory, run_figures, run_report

app = typer.Typer()

Runs = Annotated[list[Path], argument("RUN...", "Directories of runs.")]
Smooth = Annotated[
    int,
    option(
        ...,
        "N",
        "Records over which curves are averaged; 1 for none.",
        shown="a 25th of the records",
        min=0,
    ),
]


@app.command()
def plot(
    runs: Runs,
    *,
    out: Path | None = option(
        None,
        "FILE",
        "File to write: .png, .svg or .pdf.",
        shown="RUN/plots/training.png; runs.png for several runs",
    ),
    smooth: Smooth = 0,
) -> None:
    """Draw runs as a figure: loss, metrics, learning rate, speed, times.

    Runs may also be running, stopped or failed. Several runs are drawn in the same axes. Dotted
    vertical lines mark steps at which a run continued from a checkpoint, and values that are not
    finite. The command needs matplotlib.

    Examples:
      hpctrain plot runs/digits

      hpctrain plot runs/a runs/b --out both.svg

      hpctrain plot runs/digits --smooth 20
    """
    one = run_directory.RunDirectory(runs[0]).plot if len(runs) == 1 else Path("runs.png")
    run_figures.draw_runs(_read(runs), out or one, smooth)
    typer.echo(out or one)


@app.command()
def report(
    runs: Runs,
    *,
    out: Path | None = option(
        None, "FILE", "Page to write.", shown="RUN/report.html; runs.html for several runs"
    ),
    smooth: Smooth = 0,
) -> None:
    """Write a self-contained HTML page about runs.

    The page shows the curves of hpctrain plot, the times of each rank, results, the parts of each
    run, and differences of configuration and environment: between runs, or, for a single run, from
    the defaults. The command needs plotly.

    Examples:
      hpctrain report runs/digits

      hpctrain report runs/a runs/b --out both.html
    """
    one = runs[0] / "report.html" if len(runs) == 1 else Path("runs.html")
    typer.echo(run_report.write_report(_read(runs), out or one, smooth))


def _read(paths: list[Path]) -> list[history.RunHistory]:
    """Read the runs; print a note on stderr for each run without a step record."""
    found = history.histories(paths)
    for run in found:
        if not run.view.last:
            typer.echo(
                f"{run.path} has no record of a step yet, and therefore no curves", err=True
            )
    return found


@app.command()
def compare(runs: Runs) -> None:
    """Compare runs: results, speed, configuration, environment.

    Two runs do not prove a difference of speed; hpctrain study measures such differences. The exit
    code is 0 also if the runs differ.

    Examples:
      hpctrain compare runs/a runs/b
    """
    if len(runs) < 2:
        raise ConfigError(f"compare must get two runs or more, got {runs[0]}; add another run")
    console.make_console(shown=True).print(run_report.comparison(history.histories(runs)))


@app.command("runs")
def list_runs(
    folder: Path = argument("DIR", "Directory of runs.", default=Path("runs"), shown=True),
) -> None:
    """List the runs in a directory: state, step, loss, metric, ranks, start.

    The state is determined as by hpctrain status, without Slurm's queue.

    Examples:
      hpctrain runs

      hpctrain runs /scratch/me/runs
    """
    console.make_console(shown=True).print(run_report.overview(history.found_in(folder)))
