"""The cluster from a shell: ``python -m tests.cluster.slurm --help``."""

import os
from pathlib import Path
from typing import Annotated

import typer

from tests.cluster.slurm import holder
from tests.cluster.slurm.check import obstacle
from tests.cluster.slurm.cluster import SlurmCluster
from tests.cluster.slurm.mode import Mode
from tests.cluster.vcluster.__main__ import SKIPPED

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Directory = Annotated[Path, typer.Option("-d", "--directory", help="Holds all its files.")]
Nodes = Annotated[int, typer.Option("-n", "--nodes", min=1, max=60, help="How many nodes.")]
Cpus = Annotated[int, typer.Option("-c", "--cpus", min=1, help="Of each node, as Slurm sees it.")]
Gpus = Annotated[int, typer.Option("-g", "--gpus", min=0, help="Of each node; stand-ins.")]
OfMode = Annotated[Mode, typer.Option("-m", "--mode", help="What a node has of its own.")]
Accounting = Annotated[bool, typer.Option(help="With a data base for sacct.")]

DIRECTORY = Path(f"/tmp/slurm.{os.getuid()}")


@app.callback()
def about() -> None:
    """A private, real Slurm of virtual nodes on one machine."""


@app.command()
def check(mode: OfMode = "uts", *, accounting: Accounting = False) -> None:
    """Say whether this machine can: exit code 0, or 77 and the reason."""
    reason = obstacle(mode, accounting=accounting)
    typer.echo(reason or "a private Slurm works here")
    raise typer.Exit(SKIPPED if reason else 0)


@app.command()
def up(
    *,
    directory: Directory = DIRECTORY,
    nodes: Nodes = 4,
    cpus: Cpus = 4,
    gpus: Gpus = 0,
    mode: OfMode = "uts",
    accounting: Accounting = False,
) -> None:
    """Start a cluster and print the line that lets a shell reach it.

    Example:
      eval "$(python -m tests.cluster.slurm up -n 2)"; sinfo; srun -N 2 hostname
    """
    if reason := obstacle(mode, accounting=accounting):
        typer.echo(reason, err=True)
        raise typer.Exit(SKIPPED)
    directory = directory.absolute()
    if directory.exists():
        typer.echo(f"{directory} is there already: `down` ends a cluster, or give -d", err=True)
        raise typer.Exit(2)
    options = [f"--nodes={nodes}", f"--cpus={cpus}", f"--gpus={gpus}", f"--mode={mode}"]
    if failure := holder.launch(directory, [*options, *["--accounting"] * accounting]):
        typer.echo(failure, err=True)
        raise typer.Exit(1)
    typer.echo(f"export SLURM_CONF={directory}/slurm.conf")
    typer.echo(f"# {directory}/on HOST COMMAND runs a command on a node", err=True)
    if mode == "net":
        typer.echo(f"# clients run on login: {directory}/on login sinfo", err=True)


@app.command()
def down(*, directory: Directory = DIRECTORY) -> None:
    """End a cluster, with all its jobs and files."""
    if not holder.release(directory.absolute()):
        typer.echo(f"no cluster in {directory}", err=True)
        raise typer.Exit(1)


@app.command(hidden=True)
def hold(
    *,
    directory: Directory,
    nodes: Nodes = 4,
    cpus: Cpus = 4,
    gpus: Gpus = 0,
    mode: OfMode = "uts",
    accounting: Accounting = False,
) -> None:
    """Be the process that a cluster belongs to."""
    holder.hold(
        SlurmCluster(
            directory=directory,
            nodes=nodes,
            cpus=cpus,
            gpus=gpus,
            mode=mode,
            accounting=accounting,
        )
    )


if __name__ == "__main__":
    app()
