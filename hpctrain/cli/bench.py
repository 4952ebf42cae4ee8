"""``hpctrain bench``: speed and correctness of operations, and figures of a machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from hpctrain.cli.options import FAILED, argument, flag, option, takes
from hpctrain.comm import mpi_world
from hpctrain.core import atomic, keys
from hpctrain.core.units import format_bytes, format_seconds, parse_bytes
from hpctrain.cost import fitting
from hpctrain.doctor.benchmarks import benchmark
from hpctrain.train import console

if TYPE_CHECKING:
    from hpctrain.cost.fitting import Fit


class Operations(TyperGroup):
    """Command group that reads ``bench OPERATION`` as ``bench measure OPERATION``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with ``measure`` inserted if the first word is an operation."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["measure", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=Operations, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure operations, or fit the figures of a machine to measurements.

    The word measure may be omitted.

    Examples:
      hpctrain launch -n 4 hpctrain bench allreduce --peers

      hpctrain bench allreduce --help

      hpctrain bench fit points.json --out machine.toml
    """


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Arguments and options of ``hpctrain bench measure``."""

    operation: str = argument(
        "OPERATION", "allreduce, reduce_scatter, all_gather, alltoall, broadcast, barrier or send."
    )
    min_bytes: str = option("8", "SIZE", "Smallest message, in bytes or with a unit.")
    max_bytes: str = option("64MiB", "SIZE", "Largest message, in bytes or with a unit.")
    dtype: str = option("float32", "NAME", "Data type of torch.")
    iterations: int | None = option(
        None, "N", "Timed calls for each size.", shown="as many as fit into 0.5 s", min=1
    )
    bucket: bool = flag("All-reduce buckets in node memory, like gradients.", "--bucket")
    peers: bool = flag("Also measure MPI_Allreduce on the same memory.", "--peers")
    json: Path | None = option(None, "FILE", "Write the points for hpctrain bench fit.", "--json")


@app.command()
@takes(MeasureOptions)
def measure(options: MeasureOptions) -> None:
    """Measure an operation at growing sizes, and check every value of the results.

    The time of a call is the mean over many calls in sequence, in µs: on the fastest rank, on
    average, and on the slowest rank. Algorithm bandwidth is the bytes of the message divided by
    the average, in GB/s; bus bandwidth, defined as in nccl-tests, can be compared between
    operations and numbers of ranks.

    The exit code is 1 if a value was wrong.

    Examples:
      hpctrain launch -n 4 hpctrain bench allreduce --peers

      hpctrain launch -n 4 --nodes 2 hpctrain bench allreduce --bucket

      hpctrain launch -n 3 hpctrain bench all_gather --dtype bfloat16

      hpctrain launch -n 4 hpctrain bench alltoall > figures

      srun -n 8 hpctrain bench send --min-bytes 1KiB --max-bytes 1GiB
    """
    mpi_world.doubt()  # before the import of torch, which takes seconds
    request = benchmark.BenchmarkRequest(
        operation=options.operation,
        min_bytes=parse_bytes(options.min_bytes),
        max_bytes=parse_bytes(options.max_bytes),
        dtype=options.dtype,
        in_bucket=options.bucket,
        peers=options.peers,
        iterations=options.iterations,
    )
    if not benchmark.run(request, console.make_console, options.json):
        raise typer.Exit(FAILED)


@app.command()
def fit(
    files: list[Path] = argument("FILES", "Files that bench --json wrote on one machine."),
    *,
    out: Path | None = option(None, "FILE", "Write the figures as a TOML file.", "--out"),
) -> None:
    """Fit latencies and bandwidths of a machine to measured all-reduces; print the residuals.

    Measure several sizes on one node and on several nodes; otherwise the points do not determine
    all figures. The command also prints the error at points that the fit did not use, which is
    the expected error of predictions for other sizes and numbers of nodes.

    Examples:
      hpctrain launch -n 4 --nodes 2 hpctrain bench allreduce --bucket --json points.json

      hpctrain bench fit points.json --out machine.toml

      hpctrain bench fit perf/results/cost-1gbit.json
    """
    found = fitting.fit([point for file in files for point in fitting.read_points(file)])
    _show(found)
    if out is None:
        return
    explained = atomic.explained_writes("--out", out, "name another file")
    with explained, atomic.publishing(out) as part:
        part.write_text(keys.render(found.machine()), encoding="utf-8")
    typer.echo(f"machine written to {out}")


def _show(found: "Fit") -> None:
    screen, machine = console.make_console(shown=True), found.machine()
    points = [
        (
            *(str(point.nodes), str(point.ranks_per_node), str(point.spec)),
            *(format_bytes(point.num_bytes), format_seconds(point.seconds)),
            *(format_seconds(found.seconds(point)), f"{off:+.0%}"),
        )
        for point, off in zip(found.points, found.residuals, strict=True)
    ]
    heads = ("nodes", "ranks each", "path", "message", "measured", "model", "off by")
    screen.print(console.figures("points, measured and by the fit", heads, points))
    rows = [
        ("node", format_seconds(machine.node.latency_s), machine.node.bytes_per_s),
        ("network", format_seconds(machine.network.latency_s), machine.network.bytes_per_s),
        ("processor, to the network", "", machine.handle_bytes_per_s),
        ("reduction", "", machine.reduce_bytes_per_s),
    ]
    rates = [
        (*row, "too fast to measure" if rate == float("inf") else f"{rate / 1e6:.4g} MB/s")
        for *row, rate in rows
    ]
    title = "figures of the machine, fitted"
    screen.print(console.figures(title, ("", "latency", "bandwidth"), rates))
    screen.print(
        f"median error {found.error:.1%}; {found.held_out:.1%} at points that the fit did not use"
    )
