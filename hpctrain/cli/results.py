"""``hpctrain plot``, ``report``, ``compare`` and ``runs``: what runs have come to."""

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import argument, option
from hpctrain.core.errors import ConfigError

Runs = Annotated[list[Path], argument("RUN...", "Folders of runs.")]
Smooth = Annotated[
    int,
    option(
        "N",
        "Records over which curves are averaged; 1 for none.",
        default="a 50th of the records",
        min=0,
    ),
]


def plot(
    runs: Runs,
    *,
    out: Annotated[
        Path | None,
        option(
            "FILE",
            "A file .png, .svg or .pdf.",
            default="RUN/plots/training.png, of several runs.png",
        ),
    ] = None,
    smooth: Smooth = 0,
) -> None:
    """Draw runs into a picture: loss, metrics, learning rate, speed, where the time went.

    A run may be at work, stopped or failed. Several lie over each other. Dotted lines are parts
    that have gone on from a checkpoint; what is not finite is marked. Needs matplotlib.

    For instance:

      hpctrain plot runs/digits

      hpctrain plot runs/a runs/b --out both.svg

      hpctrain plot runs/digits --smooth 20
    """
    from hpctrain.train.history import histories  # noqa: PLC0415
    from hpctrain.train.run_directory import RunDirectory  # noqa: PLC0415
    from hpctrain.train.run_figures import draw_runs  # noqa: PLC0415 - loaded where it is used

    one = RunDirectory(runs[0]).plot if len(runs) == 1 else Path("runs.png")
    draw_runs(histories(runs), out or one, smooth)
    typer.echo(out or one)


def report(
    runs: Runs,
    *,
    out: Annotated[
        Path | None, option("FILE", "The page.", default="RUN/report.html, of several runs.html")
    ] = None,
    smooth: Smooth = 0,
) -> None:
    """Write a page about runs, which needs no other file and no network.

    It has the curves of hpctrain plot, the times of each rank, results, parts, and how
    configuration and environment differ between runs; of one run, from the defaults. Needs plotly.

    For instance:

      hpctrain report runs/digits

      hpctrain report runs/a runs/b --out both.html
    """
    from hpctrain.train.history import histories  # noqa: PLC0415
    from hpctrain.train.run_report import write_report  # noqa: PLC0415

    one = runs[0] / "report.html" if len(runs) == 1 else Path("runs.html")
    typer.echo(write_report(histories(runs), out or one, smooth))


def compare(runs: Runs) -> None:
    """Tell how runs differ: results, speed, configuration, environment.

    One run of each is no proof that one is faster: hpctrain study measures that. The exit code is
    0, however much they differ.

    For instance:

      hpctrain compare runs/a runs/b
    """
    from rich.console import Console  # noqa: PLC0415

    from hpctrain.train.history import histories  # noqa: PLC0415
    from hpctrain.train.run_report import comparison  # noqa: PLC0415

    if len(runs) < 2:
        raise ConfigError(f"a comparison is of two runs or more, got {runs[0]}; name another one")
    Console(highlight=False, markup=False).print(comparison(histories(runs)))


def runs(
    folder: Annotated[Path, argument("DIR", "Where runs lie.", default=True)] = Path("runs"),
) -> None:
    """List the runs in a folder: name, state, step, loss, metric, ranks, start.

    The states are those of hpctrain status, without a look into the queue.

    For instance:

      hpctrain runs

      hpctrain runs /scratch/me/runs
    """
    from rich.console import Console  # noqa: PLC0415

    from hpctrain.train.history import found_in  # noqa: PLC0415
    from hpctrain.train.run_report import overview  # noqa: PLC0415

    Console(highlight=False, markup=False).print(overview(found_in(folder)))
