"""Benchmarks of operations: check the request, measure each size, print the results."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import torch
from rich.console import Console

from hpctrain.cluster.machine_load import LoadMeter, MachineLoad
from hpctrain.comm.agreement import on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.mpi_library import LibraryAllreduce, require_type
from hpctrain.comm.ops import Op, combination
from hpctrain.core.errors import CommError, ConfigError
from hpctrain.core.torch_compat import FLOAT8_SCALE
from hpctrain.cost.collectives import ON_A_NODE
from hpctrain.cost.fitting import Point, write_points
from hpctrain.cost.schedules import SCHEDULES
from hpctrain.doctor.benchmarks.operations import OPERATIONS, Case, Setup
from hpctrain.runtime import initialization, world
from hpctrain.runtime.world import World

FACTOR = 4  # ratio of consecutive sizes

UNCHECKABLE = (FLOAT8_SCALE,)
"""Types whose sums are not exact, because they represent only powers of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRequest:
    """Request for a benchmark: an operation and a range of message sizes."""

    operation: str  # one of ``OPERATIONS``
    min_bytes: int = 8  # smallest message
    max_bytes: int = 64 << 20  # largest message
    dtype: str = "float32"  # name of a dtype of torch
    in_bucket: bool = False  # all-reduce a bucket in node memory instead of a tensor
    peers: bool = False  # also measure MPI_Allreduce, on the same memory
    iterations: int | None = None
    """Timed calls per size; None for as many as take half a second, between 5 and 1000."""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` if a field is invalid."""
        if self.operation not in OPERATIONS:
            raise ConfigError(
                f"an operation must be one of {', '.join(OPERATIONS)}, got {self.operation!r}"
            )
        if not 1 <= self.min_bytes <= self.max_bytes:
            raise ConfigError(
                "--min-bytes must be at least 1 and at most --max-bytes, got --min-bytes "
                f"{self.min_bytes} and --max-bytes {self.max_bytes}"
            )
        for option, given in (("--bucket", self.in_bucket), ("--peers", self.peers)):
            if given and self.operation != "allreduce":
                raise ConfigError(
                    f"the operation of {option} must be allreduce, got {self.operation}; omit the "
                    "option"
                )
        self.setup(0)  # checks the dtype

    def setups(self) -> list[Setup]:
        """Return the setups of all message sizes, smallest first; a barrier has only size 0."""
        sizes = [0] if self.operation == "barrier" else self._sizes()
        return [self.setup(num_bytes) for num_bytes in sizes]

    def setup(self, num_bytes: int) -> Setup:
        """Return the setup of a message of the given size."""
        return Setup(num_bytes=num_bytes, dtype=self.torch_dtype, in_bucket=self.in_bucket)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Torch type of the elements; raises ``ConfigError`` for an unknown type."""
        found = getattr(torch, self.dtype, None)
        with suppress(CommError):
            if isinstance(found, torch.dtype) and found not in UNCHECKABLE:
                combination(found, Op.SUM)
                return found
        raise ConfigError(
            "--dtype must be a number type of torch, such as float32, bfloat16, int64, complex64 "
            f"or bool, got {self.dtype!r}"
        )

    def _sizes(self) -> Iterator[int]:
        num_bytes = self.min_bytes
        while num_bytes < self.max_bytes:
            yield num_bytes
            num_bytes *= FACTOR
        yield self.max_bytes


ALONE = (
    "one rank: no data are sent, so the times include only the calls; "
    "start several ranks: hpctrain launch -n 4 hpctrain bench "
)

BUDGET_S = 0.5  # time per size if the number of iterations is not given
FEWEST, MOST = 5, 1000  # limits of the number of iterations that results from ``BUDGET_S``
WARM_UP = 5  # calls before the timed calls
PEER_ROUNDS = 5  # hpctrain and MPI alternate in rounds, so that disturbances affect both


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Measurement of one message size; identical on every rank."""

    num_bytes: int  # bytes of the message
    numel: int
    dtype: str
    min_us: float
    """Minimum over ranks of the time of a call; the time of a rank is the mean over calls."""
    avg_us: float
    max_us: float
    algorithm_gbs: float  # bytes of the message divided by ``avg_us``, in 1e9 bytes per second
    bus_gbs: float
    """Lower bound of the rate of the busiest link, in 1e9 bytes per second. The rates of different
    operations and numbers of ranks can be compared."""
    num_wrong: int  # wrong elements over all ranks
    library_us: float | None = None  # ``avg_us`` of MPI_Allreduce
    library_ratio: float | None = None
    """``library_us / avg_us``; above 1, hpctrain is faster than MPI_Allreduce."""


def run(
    request: BenchmarkRequest, make_console: Callable[..., Console], json: Path | None = None
) -> bool:
    """Measure all sizes, and print each result immediately.

    Collective over all ranks of the launch. If ``json`` names a file, rank 0 writes the measured
    points to this file, which ``hpctrain bench fit`` reads.

    Returns:
        True if every compared value was correct; identical on every rank.

    Raises:
        ConfigError: the operation needs more ranks, or ``json`` is set but
            ``hpctrain.cost`` cannot model the request.
        MismatchError: ``request.peers`` is set, but MPI does not support the type.
    """
    initialization.init()
    here = world.current()
    comm = here.comm
    if request.operation == "send" and comm.size == 1:
        raise ConfigError(
            "send must have at least two ranks, got one; use hpctrain launch -n 2 "
            "hpctrain bench send"
        )
    if request.peers:
        on_root(comm, lambda: require_type(request.torch_dtype))
    if json is not None:
        on_root(comm, lambda: _check_modelled(request, here, json.parent), ConfigError)
    console = make_console(shown=comm.rank == 0)
    _describe(console, here, request)
    meter = LoadMeter()
    rows = _measure_all(comm, request, console)
    _print_load(console, here, comm.allgather_object(meter.read()))
    if json is not None and comm.rank == 0:
        points = list(_points(rows, request, here))
        write_points(json, points)
        if left := len(rows) - len(points):
            console.print(
                f"# {left} sizes are not in {json}, because their algorithm has no model"
            )
    num_wrong = sum(row.num_wrong for row in rows)
    if num_wrong:
        console.print(f"{num_wrong} wrong values: results of collectives on these ranks are wrong")
    return num_wrong == 0


def _print_load(console: Console, here: World, loads: Sequence[MachineLoad | None]) -> None:
    """Print the load that other processes than the ranks cause on the host of rank 0.

    ``loads[rank]`` is the load that ``rank`` measured on its host.
    """
    hosts = {r: h for h, ranks in zip(here.topology.hosts, here.topology.nodes, strict=True)
             for r in ranks}  # fmt: skip
    first, *others = (load for rank, load in enumerate(loads) if hosts[rank] == hosts[0])
    if first is not None:
        found = first.without(filter(None, others))
        console.print(
            f"# {found.describe()}{', which makes the measured times too long' * found.is_busy}"
        )


def _check_modelled(request: BenchmarkRequest, here: World, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"--json must name a file in an existing folder, but {folder} does not exist; create "
            "it"
        )
    sizes = {len(ranks) for ranks in here.topology.nodes}
    if request.operation != "allreduce" or request.dtype != "float32" or len(sizes) > 1:
        raise ConfigError(
            "the measurement of --json must be allreduce of float32 on nodes with equal numbers "
            f"of ranks, got {request.operation} of {request.dtype} on nodes of "
            f"{', '.join(map(str, sorted(sizes)))} ranks; omit --json"
        )


def _points(rows: list[Row], request: BenchmarkRequest, here: World) -> Iterator[Point]:
    topology, plan = here.topology, here.plan
    for row in rows:
        way = plan.tensors.at(row.num_bytes)
        if request.in_bucket and plan.node_memory != "none":
            way = "levels" if plan.num_rails else "slices"
        if way == "levels":
            way = plan.rail.at(row.num_bytes // plan.num_rails)
        if way in ON_A_NODE or (plan.num_rails and way in SCHEDULES):
            yield Point(
                nodes=topology.num_nodes,
                ranks_per_node=topology.size // topology.num_nodes,
                nics=topology.cards,
                algorithm=way,
                rails=plan.num_rails or 1,
                ranks_per_core=len(topology.core_peers) / topology.num_peer_cores,
                num_bytes=row.num_bytes,
                seconds=row.max_us / 1e6,
            )


def _measure_all(comm: Communicator, request: BenchmarkRequest, console: Console) -> list[Row]:
    rows = []
    console.print(head(peers=request.peers), soft_wrap=True)
    for setup in request.setups():
        rows.append(measure(comm, request, setup))
        console.print(line(rows[-1]), soft_wrap=True)
    return rows


def _describe(console: Console, here: World, request: BenchmarkRequest) -> None:
    """Print the lines above the table: the machine and the plan."""
    plan = [*here.plan.describe(), ("plan chosen by", here.plan_origin)]
    rows = [*here.topology.describe(), *plan]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(f"# {name:{width}}  {text}", soft_wrap=True)
    console.print("#")
    if here.comm.size == 1:
        console.print(f"# {ALONE}{request.operation}", soft_wrap=True)


_COLUMNS = (
    *(("bytes", "12", "num_bytes"), ("elements", "11", "numel"), ("dtype", "15", "dtype")),
    *(("min us", "10.2f", "min_us"), ("avg us", "10.2f", "avg_us"), ("max us", "10.2f", "max_us")),
    *(("alg GB/s", "9.3f", "algorithm_gbs"), ("bus GB/s", "9.3f", "bus_gbs")),
    *(("wrong", "6", "num_wrong"), ("MPI us", "10.2f", "library_us")),
    ("MPI/ours", "8.2f", "library_ratio"),
)
"""For each column: its name, its format and the field of ``Row``. The last two are for MPI."""


def head(*, peers: bool) -> str:
    """Return the head of the table: the names of the columns."""
    shown = _COLUMNS if peers else _COLUMNS[:-2]
    return " ".join(f"{name:>{form.partition('.')[0]}}" for name, form, _ in shown)


def line(row: Row) -> str:
    """Return the line of the table for a message size."""
    values = ((form, getattr(row, name)) for _, form, name in _COLUMNS)
    return " ".join(format(value, f">{form}") for form, value in values if value is not None)


def measure(comm: Communicator, request: BenchmarkRequest, setup: Setup) -> Row:
    """Measure the operation with one message size. Collective."""
    operation = OPERATIONS[request.operation]
    case = operation.case(comm, setup)
    case.fill()
    warm_up_s = max(_seconds(comm, case.call, WARM_UP))
    affordable = round(BUDGET_S / comm.broadcast_object(warm_up_s))
    iterations = request.iterations or min(max(affordable, FEWEST), MOST)
    library_s: list[float] | None = None
    if request.peers:
        seconds, library_s = _interleaved(comm, case, iterations)
    else:
        seconds = _seconds(comm, case.call, iterations)
    if request.operation == "send":  # only the first and the last rank communicate
        seconds = [seconds[0], seconds[-1]]
    seconds = [second / operation.messages for second in seconds]
    mean = fmean(seconds)
    num_bytes = case.numel * setup.dtype.itemsize
    bandwidth = num_bytes / mean / 1e9
    return Row(
        num_bytes=num_bytes,
        numel=case.numel,
        dtype=request.dtype,
        min_us=min(seconds) * 1e6,
        avg_us=mean * 1e6,
        max_us=max(seconds) * 1e6,
        algorithm_gbs=bandwidth,
        bus_gbs=bandwidth * operation.bus_factor(comm.size),
        num_wrong=sum(comm.allgather_object(case.num_wrong())),
        library_us=None if library_s is None else fmean(library_s) * 1e6,
        library_ratio=None if library_s is None else fmean(library_s) / mean,
    )


def _seconds(comm: Communicator, work: Callable[[], object], iterations: int) -> list[float]:
    """Call ``work`` repeatedly; return the mean seconds of a call by rank. Collective."""
    comm.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        work()
    return comm.allgather_object((time.perf_counter() - start) / iterations)


def _interleaved(
    comm: Communicator, case: Case, iterations: int
) -> tuple[list[float], list[float]]:
    """Measure rounds of hpctrain and MPI alternately. Collective.

    Returns the seconds of a call by rank, first of hpctrain, then of MPI: medians over the rounds.
    """
    library = LibraryAllreduce(case.given[0].values, Op.SUM)
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    each = -(-iterations // PEER_ROUNDS)
    try:
        library()
        for _ in range(PEER_ROUNDS):
            ours.append(_seconds(comm, case.call, each))
            theirs.append(_seconds(comm, library, each))
    finally:
        library.close()
    return _medians(ours), _medians(theirs)


def _medians(turns: list[list[float]]) -> list[float]:
    return [median(of_rank) for of_rank in zip(*turns, strict=True)]
