"""``hpctrain bench``: how fast operations are, whether they are right, and what models say."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from hpctrain.cli.options import argument, flag, option
from hpctrain.core.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.cost.fitting import Fit

WRONG = 1  # exit code when a value was wrong


class Operations(TyperGroup):
    """Takes the name of an operation, and what else ``measure`` takes, without that word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in the word where it is left out."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["measure", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    cls=Operations,
    name="bench",
    no_args_is_help=True,
    help="""Measure operations at growing sizes, or fit a machine's figures to what was measured.

    hpctrain bench measure OPERATION may leave out the word measure. For instance:

      hpctrain launch -n 4 hpctrain bench allreduce --peers

      hpctrain bench allreduce --help

      hpctrain bench fit points.json --out machine.toml
    """,
)


@bench.command()
def measure(  # noqa: PLR0913 - a command's options
    operation: Annotated[
        str,
        argument(
            "OPERATION",
            "allreduce, reduce_scatter, all_gather, alltoall, broadcast, barrier or send.",
        ),
    ],
    *,
    min_bytes: Annotated[str, option("SIZE", "First size of a message.")] = "8",
    max_bytes: Annotated[str, option("SIZE", "Last size of a message.")] = "64MiB",
    dtype: Annotated[str, option("NAME", "Torch's name of the values' type.")] = "float32",
    iterations: Annotated[
        int | None,
        option("N", "Timed calls of each size.", default="as many as fit into 0.5 s", min=1),
    ] = None,
    bucket: Annotated[
        bool, flag("All-reduce buckets in node memory, as gradients are.", "--bucket")
    ] = False,
    peers: Annotated[
        bool, flag("All-reduce with MPI_Allreduce too, on the same memory.", "--peers")
    ] = False,
    json: Annotated[
        Path | None, option("FILE", "Write what hpctrain bench fit reads.", "--json")
    ] = None,
) -> None:
    """Measure an operation at growing sizes, and check every value of it.

    The time of a call is the mean over many that follow each other: on the
    fastest rank, on average, on the slowest. Algorithm bandwidth is bytes of
    the message by the average; bus bandwidth, as nccl-tests counts it, can be
    compared between operations and numbers of ranks.

    The exit code is 1 if a value was wrong.

    For instance:

      hpctrain launch -n 4 hpctrain bench allreduce --peers

      hpctrain launch -n 4 --nodes 2 hpctrain bench allreduce --bucket

      hpctrain launch -n 3 hpctrain bench all_gather --dtype bfloat16

      hpctrain launch -n 4 hpctrain bench alltoall > figures

      srun -n 8 hpctrain bench send --min-bytes 1KiB --max-bytes 1GiB
    """
    from hpctrain.comm.mpi_world import doubt  # noqa: PLC0415

    doubt()  # before torch, which takes seconds to load
    from hpctrain.core.units import parse_bytes  # noqa: PLC0415
    from hpctrain.doctor.benchmarks.benchmark import BenchmarkRequest, run  # noqa: PLC0415
    from hpctrain.train.console import make_console  # noqa: PLC0415

    request = BenchmarkRequest(
        operation=operation,
        min_bytes=parse_bytes(min_bytes),
        max_bytes=parse_bytes(max_bytes),
        dtype=dtype,
        in_bucket=bucket,
        peers=peers,
        iterations=iterations,
    )
    if not run(request, make_console, json):
        raise typer.Exit(WRONG)


@bench.command()
def fit(
    files: Annotated[list[Path], argument("FILES", "Points of one machine.")],
    *,
    out: Annotated[Path | None, option("FILE", "Write the machine as TOML.", "--out")] = None,
) -> None:
    """Fit latencies and bandwidths of a machine to measured sums, and show what is off.

    Sums of several sizes, on one node and on several, tell the figures apart. The error on points
    not fitted to is what to expect of a prediction for sizes and nodes in between.

    For instance:

      hpctrain launch -n 4 --nodes 2 hpctrain bench allreduce --bucket --json points.json

      hpctrain bench fit points.json --out machine.toml

      hpctrain bench fit perf/results/cost-1gbit.json
    """
    from hpctrain.core.atomic import publishing, refusal  # noqa: PLC0415
    from hpctrain.core.keys import render  # noqa: PLC0415
    from hpctrain.cost.fitting import fit as fitted  # noqa: PLC0415
    from hpctrain.cost.fitting import read_points  # noqa: PLC0415

    found = fitted([point for file in files for point in read_points(file)])
    _show(found)
    if out is not None:
        try:
            with publishing(out) as part:
                part.write_text(render(found.machine()), encoding="utf-8")
        except OSError as error:
            told = refusal(error, "name another file")
            raise ConfigError(f"{out} cannot be written: {told}") from None
        typer.echo(f"machine written to {out}")


def _show(found: "Fit") -> None:
    from hpctrain.core.units import format_bytes, format_seconds  # noqa: PLC0415
    from hpctrain.train.console import figures, make_console  # noqa: PLC0415

    console, machine = make_console(shown=True), found.machine()
    points = [
        (
            *(str(point.nodes), str(point.ranks_per_node), str(point.way)),
            *(format_bytes(point.num_bytes), format_seconds(point.seconds)),
            *(format_seconds(found.seconds(point)), f"{off:+.0%}"),
        )
        for point, off in zip(found.points, found.residuals, strict=True)
    ]
    heads = ("nodes", "ranks each", "way", "message", "measured", "model", "off by")
    console.print(figures("points, measured and by the fit", heads, points))
    rows = [
        ("node", format_seconds(machine.node.latency_s), machine.node.bytes_per_s),
        ("network", format_seconds(machine.network.latency_s), machine.network.bytes_per_s),
        ("processor, to the network", "", machine.handle_bytes_per_s),
        ("combining", "", machine.reduce_bytes_per_s),
    ]
    rates = [
        (*row, "too fast to see" if rate == float("inf") else f"{rate / 1e6:.4g} MB/s")
        for *row, rate in rows
    ]
    title = "figures of the machine, fitted"
    console.print(figures(title, ("", "latency", "bytes a second"), rates))
    console.print(f"median error {found.error:.1%}; {found.held_out:.1%} on points not fitted to")
