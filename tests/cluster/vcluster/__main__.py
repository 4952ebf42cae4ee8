"""The cluster from a shell: ``python -m tests.cluster.vcluster --help``."""

import sys
from typing import Annotated

import typer

from tests.cluster.vcluster.check import obstacle
from tests.cluster.vcluster.cluster import VirtualCluster
from tests.cluster.vcluster.mpi import Mpi, Order, share

SKIPPED = 77
"""Exit code of what this machine cannot do, as Automake has it."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Virtual nodes on one machine, joined by links of a set rate and latency. Needs root."""


@app.command()
def check() -> None:
    """Say whether this machine can: exit code 0, or 77 and the reason."""
    reason = obstacle()
    typer.echo(reason or "virtual clusters work here")
    raise typer.Exit(SKIPPED if reason else 0)


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def run(
    ctx: typer.Context,
    *,
    num_ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="How many ranks.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes.")] = 2,
    ranks_per_node: Annotated[
        str | None, typer.Option(help="Ranks of each node, in place of -n.", metavar="3,1")
    ] = None,
    rate: Annotated[str, typer.Option(help="Of each link, as tc has it; or none.")] = "1gbit",
    latency: Annotated[str | None, typer.Option(help="Of every link, such as 50us.")] = None,
    order: Annotated[Order, typer.Option(help="How ranks are numbered.")] = "block",
    mpi: Annotated[Mpi, typer.Option(help="Whose launcher.")] = "openmpi",
    timeout: Annotated[float, typer.Option(help="End all after so many seconds.")] = 600.0,
) -> None:
    """Run a command on ranks across virtual nodes and print the bytes that left each node.

    Behind the options comes the command. The exit code is the command's, or 77 where this
    machine can be no cluster.

    Examples:
      python -m tests.cluster.vcluster run --rate 200mbit --order cyclic -n 4 -- python job.py

      python -m tests.cluster.vcluster run --ranks-per-node 3,1 --mpi mpich -- python job.py
    """
    if not ctx.args:
        raise typer.BadParameter("a command is missing behind the options")
    if reason := obstacle():
        typer.echo(reason, err=True)
        raise typer.Exit(SKIPPED)
    ranks = share(num_ranks, nodes)
    if ranks_per_node is not None:
        ranks = [int(word) for word in ranks_per_node.split(",")]
    rate_or_none = None if rate == "none" else rate
    with VirtualCluster(nodes=len(ranks), rate=rate_or_none, latency=latency) as cluster:
        process = cluster.start(
            ctx.args,
            ranks_per_node=ranks,
            order=order,
            mpi=mpi,
            stdout=sys.stdout,
            stderr=sys.stderr,
        )
        done = cluster.finish(process, timeout)
    for node, sent in done.sent_bytes.items():
        typer.echo(f"{node} sent {sent / 2**20:.2f} MiB", err=True)
    raise typer.Exit(done.returncode)


if __name__ == "__main__":
    app()
