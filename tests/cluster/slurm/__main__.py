"""The cluster from a shell: ``python -m tests.cluster.slurm --help``."""

import os
import subprocess
from typing import Annotated

import typer

from tests.cluster.slurm.check import obstacle
from tests.cluster.slurm.cluster import SlurmCluster
from tests.cluster.vcluster.__main__ import SKIPPED

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """A private, real Slurm of virtual nodes on one machine."""


@app.command()
def check() -> None:
    """Say whether this machine can: exit code 0, or 77 and the reason."""
    reason = obstacle()
    typer.echo(reason or "a private Slurm works here")
    raise typer.Exit(SKIPPED if reason else 0)


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def run(
    ctx: typer.Context,
    *,
    nodes: Annotated[int, typer.Option("-n", "--nodes", min=1, max=60, help="How many.")] = 4,
    cpus: Annotated[int, typer.Option("-c", "--cpus", min=1, help="Of each, for Slurm.")] = 4,
    gpus: Annotated[int, typer.Option("-g", "--gpus", min=0, help="Of each; stand-ins.")] = 0,
) -> None:
    """Start a cluster and run a command that reaches it, by default a shell; it ends with that.

    Examples:
      python -m tests.cluster.slurm run

      python -m tests.cluster.slurm run -n 2 -- srun -N 2 hostname
    """
    if reason := obstacle():
        typer.echo(reason, err=True)
        raise typer.Exit(SKIPPED)
    with SlurmCluster(nodes=nodes, cpus=cpus, gpus=gpus) as cluster:
        command = ctx.args or [os.environ.get("SHELL", "sh")]
        done = subprocess.run(command, env=os.environ | cluster.environ, check=False)
    raise typer.Exit(done.returncode)


if __name__ == "__main__":
    app()
