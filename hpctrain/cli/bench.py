"""``hpctrain bench``: how fast the operations of this world are, and whether they are right."""

from typing import Annotated

import typer

WRONG = 1  # exit code when a value was wrong

Operation = Annotated[
    str,
    typer.Argument(
        metavar="OPERATION",
        help="allreduce, reduce_scatter, all_gather, alltoall, broadcast, barrier or send.",
        show_default=False,
    ),
]
MinBytes = Annotated[str, typer.Option(metavar="SIZE", help="First size of a message.")]
MaxBytes = Annotated[str, typer.Option(metavar="SIZE", help="Last size of a message.")]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="Torch's name of the values' type.")]
Iterations = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Timed calls of each size.",
        show_default="as many as fit into 0.5 s",
    ),
]
InBucket = Annotated[
    bool, typer.Option("--bucket", help="All-reduce buckets in node memory, as gradients are.")
]
Peers = Annotated[
    bool, typer.Option("--peers", help="All-reduce with MPI_Allreduce too, on the same memory.")
]


def bench(  # noqa: PLR0913 - a command's options
    operation: Operation,
    *,
    min_bytes: MinBytes = "8",
    max_bytes: MaxBytes = "64MiB",
    dtype: Dtype = "float32",
    iterations: Iterations = None,
    bucket: InBucket = False,
    peers: Peers = False,
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
    if not run(request, make_console):
        raise typer.Exit(WRONG)
