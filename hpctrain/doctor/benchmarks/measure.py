"""One line of a benchmark: an operation at one message size, timed and checked on all ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from hpctrain.comm.communicator import Communicator
from hpctrain.doctor.benchmarks.benchmark_request import BenchmarkRequest
from hpctrain.doctor.benchmarks.operations import OPERATIONS, Case, Setup

BUDGET_S = 0.5
"""Time that one size may take where the number of iterations is not given."""
FEWEST, MOST = 5, 1000
"""Iterations that are chosen by ``BUDGET_S``."""
WARM_UP = 5
"""Calls before them that are not timed."""
PEER_ROUNDS = 5
"""Turns that ours and the library take, so that both meet the same disturbances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What was measured for one message size; the same on every rank."""

    num_bytes: int
    """Bytes of the message."""
    numel: int
    iterations: int
    min_us: float
    """Time of a call on the rank where it was shortest; a rank's time is its mean over calls."""
    avg_us: float
    max_us: float
    algorithm_gbs: float
    """Bytes of the message by ``avg_us``, in 1e9 bytes a second."""
    bus_gbs: float
    """What the busiest link carries at least; comparable between operations and world sizes."""
    num_wrong: int
    """Wrong elements over all ranks."""
    library_us: float | None = None
    """The same for MPI_Allreduce."""
    library_ratio: float | None = None
    """``library_us`` by ``avg_us``: above 1 ours is faster."""


def measure(comm: Communicator, request: BenchmarkRequest, setup: Setup) -> Row:
    """Measure what is asked for with one message. Collective."""
    operation = OPERATIONS[request.operation]
    case = operation.case(comm, setup)
    case.fill()
    warm_up_s = max(_seconds(comm, case.call, WARM_UP))
    iterations = request.iterations or _affordable(comm.broadcast_object(warm_up_s))
    library_s: list[float] | None = None
    if request.peers:
        seconds, library_s = _in_turn(comm, case, setup, iterations)
    else:
        seconds = _seconds(comm, case.call, iterations)
    if request.operation == "send":  # the ranks in between do nothing
        seconds = [seconds[0], seconds[-1]]
    seconds = [second / operation.ways for second in seconds]
    mean = fmean(seconds)
    num_bytes = case.numel * setup.dtype.itemsize
    bandwidth = num_bytes / mean / 1e9
    return Row(
        num_bytes=num_bytes,
        numel=case.numel,
        iterations=iterations,
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
    """Return the mean seconds of a call on each rank; the calls follow each other at once."""
    comm.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        work()
    return comm.allgather_object((time.perf_counter() - start) / iterations)


def _affordable(warm_up_s: float) -> int:
    return min(max(round(BUDGET_S / warm_up_s), FEWEST), MOST)


def _in_turn(
    comm: Communicator, case: Case, setup: Setup, iterations: int
) -> tuple[list[float], list[float]]:
    """Time ours and the library in turn; return the median turn of each rank for both."""
    from hpctrain.comm.mpi_library import LibraryAllreduce  # noqa: PLC0415 - one rank needs no MPI

    library = LibraryAllreduce(case.given[0].values, setup.op)
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
