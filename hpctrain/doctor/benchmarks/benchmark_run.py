"""A benchmark from its request to the last line."""

from collections.abc import Callable

from rich.console import Console

from hpctrain.comm.agreement import on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError
from hpctrain.doctor.benchmarks.benchmark_request import BenchmarkRequest
from hpctrain.doctor.benchmarks.measure import Row, measure
from hpctrain.runtime import world
from hpctrain.runtime.world import World

ALONE = (
    "one rank: nothing moves, so these are the costs of the calls alone; "
    "for more: hpctrain launch -n 4 hpctrain bench "
)


def run(request: BenchmarkRequest, make_console: Callable[..., Console]) -> bool:
    """Measure all sizes, and print each as soon as it is measured.

    Collective over all ranks that were started together.

    Returns:
        Whether every value that was compared was right; the same on every rank.

    Raises:
        ConfigError: this takes more ranks than there are.
        MismatchError: MPI has no such type to compare with.
    """
    world.init()
    here = world.current()
    comm = here.comm
    if request.operation == "send" and comm.size == 1:
        raise ConfigError(
            "send takes two ranks, got one; for instance: hpctrain launch -n 2 hpctrain bench send"
        )
    if request.peers:
        from hpctrain.comm.mpi_library import require_type  # noqa: PLC0415 - one rank needs no MPI

        on_root(comm, lambda: require_type(request.torch_dtype))
    console = make_console(shown=comm.rank == 0)
    _describe(console, here, request)
    rows = _measure_all(comm, request, console)
    num_wrong = sum(row.num_wrong for row in rows)
    if num_wrong:
        console.print(f"{num_wrong} wrong values: the results of this world cannot be trusted")
    return num_wrong == 0


def _measure_all(comm: Communicator, request: BenchmarkRequest, console: Console) -> list[Row]:
    rows = []
    console.print(head(peers=request.peers), soft_wrap=True)
    for setup in request.setups():
        rows.append(measure(comm, request, setup))
        console.print(line(rows[-1], request.dtype, request.op_shown), soft_wrap=True)
    return rows


def _describe(console: Console, here: World, request: BenchmarkRequest) -> None:
    """Print the machine and the plan above the table."""
    plan = [*here.plan.describe(), ("plan chosen by", here.plan_origin)]
    rows = [*here.topology.describe(), *plan]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(f"# {name:{width}}  {text}", soft_wrap=True)
    console.print("#")
    if here.comm.size == 1:
        console.print(f"# {ALONE}{request.operation}", soft_wrap=True)


_HEAD = (
    f"{'bytes':>12} {'elements':>11} {'dtype':>15} {'op':>7} "
    f"{'min us':>10} {'avg us':>10} {'max us':>10} {'alg GB/s':>9} {'bus GB/s':>9} {'wrong':>6}"
)
_PEER_HEAD = f" {'MPI us':>10} {'MPI/ours':>8}"


def head(*, peers: bool) -> str:
    """Return the names of the columns."""
    return _HEAD + _PEER_HEAD if peers else _HEAD


def line(row: Row, dtype: str, op: str) -> str:
    """Return the line of one size; ``op`` is empty for operations that combine nothing."""
    text = f"{row.num_bytes:>12} {row.numel:>11} {dtype:>15} {op:>7} "
    text += " ".join(f"{us:>10.2f}" for us in (row.min_us, row.avg_us, row.max_us))
    text += f" {row.algorithm_gbs:>9.3f} {row.bus_gbs:>9.3f} {row.num_wrong:>6}"
    if row.library_us is not None and row.library_ratio is not None:
        text += f" {row.library_us:>10.2f} {row.library_ratio:>8.2f}"
    return text
