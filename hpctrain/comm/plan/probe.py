"""Measurement of the fastest algorithms, within a few tenths of a second.

Each time is the maximum over the ranks. All decisions depend only on such times, so all ranks make
the same runs and choose the same plan.
"""

import logging
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from hpctrain.comm import requests
from hpctrain.comm.hierarchical import HierarchicalCommunicator
from hpctrain.comm.horovod_engine import HorovodCommunicator
from hpctrain.comm.mpi_start import MPI
from hpctrain.comm.ops import Op, combination
from hpctrain.comm.plan.choice import (
    BATCHING_SIZES,
    CHUNKED_BYTES,
    SIZES,
    batching,
    best_chunk,
    candidates,
    chunk_sizes,
    refine,
)
from hpctrain.comm.plan.plan import Measurement, Plan, SizeTable, expected_s
from hpctrain.comm.waiting import Watch, wait_request
from hpctrain.core.errors import CommError, RankLostError

BUDGET_S = 0.3  # time for measuring the tables
RAIL_SHARE = 0.6  # fraction of the budget for the rails; the rest is for tensors
BATCHING_SHARE = 0.3  # additional fraction of the budget, for fusion parameters
BATCHING_RUNS = 9  # runs per size, of which the shortest is used
RUNS = 3  # timed runs of a candidate
RUN_S = 1e-3  # intended time of a run, in which short calls are repeated
MAX_CALLS = 8  # largest number of calls in a run
FIRST_SHARE = 1 / 3
"""Maximum fraction of the time of a table for its smallest size, where the gain is smallest."""

RunBy = Callable[[str, torch.Tensor], object]  # sums a 1-D tensor by the named algorithm

_LOG = logging.getLogger(__name__)


def measure_horovod(
    comm: HorovodCommunicator,
    world: MPI.Intracomm,
    plan: Plan,
    watch: Watch,
    budget_s: float = BUDGET_S,
) -> Plan:
    """Measure Horovod's flat and two-level sums; make ``comm`` use the faster sum. Collective.

    Args:
        comm: the communicator to measure.
        world: all ranks, for comparing times.
        plan: plan by rule.
        watch: performs all waits.
        budget_s: time for the measurement.

    Returns:
        The refined plan.

    Raises:
        RankLostError: a rank was lost.
    """

    def run_by(algorithm: str, values: torch.Tensor) -> None:
        comm.sums.table = SizeTable(((0, algorithm),))
        comm.allreduce_(values)

    found = _table("tensors", plan, run_by, Stopwatch(world, watch), budget_s)
    comm.sums.table = refine(plan.tensors, found, SIZES["tensors"])
    return replace(plan, tensors=comm.sums.table, measured=tuple(found))


def measure(
    comm: HierarchicalCommunicator,
    world: MPI.Intracomm,
    plan: Plan,
    watch: Watch,
    budget_s: float = BUDGET_S,
) -> Plan:
    """Measure the algorithms; make ``comm`` use the refined plan; return this plan. Collective.

    The measurement also opens the connections between ranks, which makes the first step faster.
    Sizes that do not fit into the budget keep the algorithm of the rule.

    Args:
        comm: the communicator to measure.
        world: all ranks, for comparing times.
        plan: plan by rule.
        watch: performs all waits.
        budget_s: time for the measurement of the tables.

    Raises:
        RankLostError: a rank was lost.
    """
    how = combination(torch.float32, Op.SUM)
    rail = comm.internode

    def over_rail(algorithm: str, part: torch.Tensor) -> None:
        if rail is not None:  # ranks without a rail only exchange times
            rail.allreduce_by(algorithm, part, how)

    threads = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    try:
        stopwatch = Stopwatch(world, watch)
        if plan.num_rails:
            found = _table("rail", plan, over_rail, stopwatch, RAIL_SHARE * budget_s)
            table = refine(plan.rail, found, SIZES["rail"])
            plan = replace(plan, rail=table, measured=tuple(found))
            comm.use(plan)
        found = _table("tensors", plan, comm.allreduce_by, stopwatch, budget_s)
        table = refine(plan.tensors, found, SIZES["tensors"])
        plan = replace(plan, tensors=table, measured=(*plan.measured, *found))
        comm.use(plan)
        times = _shortest(comm, stopwatch, stopwatch.elapsed_s + BATCHING_SHARE * budget_s)
        fusion_bytes, cycle_s = batching(times)
        plan = replace(plan, fusion_bytes=fusion_bytes, cycle_s=cycle_s)
        if plan.num_rails:
            plan = replace(plan, chunk_bytes=_chunk_bytes(comm, plan, stopwatch, times))
        comm.use(plan)
    finally:
        torch.set_num_threads(threads)
    return plan


def _table(
    what: str, plan: Plan, run_by: RunBy, stopwatch: "Stopwatch", until_s: float
) -> list[Measurement]:
    """Measure the algorithms of table ``what`` until ``until_s`` of the stopwatch. Collective."""
    times: dict[str, dict[int, float]] = {}
    measured: list[Measurement] = []
    failed: set[str] = set()
    begin_s = stopwatch.elapsed_s
    for num_bytes in SIZES[what]:
        is_first = num_bytes == SIZES[what][0]
        end_s = begin_s + FIRST_SHARE * (until_s - begin_s) if is_first else until_s
        values = torch.zeros(num_bytes // torch.float32.itemsize)
        figures: dict[str, list[float]] = {}
        # Interleaved, so that other load on the machine affects all candidates equally.
        for algorithm in RUNS * candidates(what, num_bytes, plan):
            if algorithm in failed:
                continue
            runs = figures.get(algorithm, [])
            expected = runs[-1] if runs else expected_s(times.get(algorithm, {}), num_bytes)
            calls = max(1, min(MAX_CALLS, int(RUN_S / expected))) if runs else 1
            if stopwatch.elapsed_s + (calls + (not runs)) * expected > end_s:
                continue
            run = partial(run_by, algorithm, values)
            seconds = stopwatch.time(run, calls, warm_up=not runs)
            if seconds is None:
                failed.add(algorithm)
                figures.pop(algorithm, None)
            else:
                figures.setdefault(algorithm, []).append(seconds)
        for algorithm, runs in figures.items():
            found = Measurement(what, num_bytes, algorithm, tuple(runs))
            times.setdefault(algorithm, {})[num_bytes] = found.seconds
            measured.append(found)
    return measured


def _shortest(
    comm: HierarchicalCommunicator, stopwatch: "Stopwatch", until_s: float
) -> dict[int, float]:
    """Return the shortest time of an all-reduce at each of ``BATCHING_SIZES``. Collective.

    Sizes that were not measured before ``until_s`` of the stopwatch are missing.
    """
    tensors = [torch.zeros(size // torch.float32.itemsize) for size in BATCHING_SIZES]
    times: dict[int, float] = {}
    for _ in range(BATCHING_RUNS):
        for tensor in tensors:
            expected = times.get(tensor.nbytes, expected_s(times, tensor.nbytes))
            if stopwatch.elapsed_s + expected > until_s:
                continue
            seconds = stopwatch.time(partial(comm.allreduce_, tensor), 1)
            if seconds is not None:
                times[tensor.nbytes] = min(seconds, times.get(tensor.nbytes, seconds))
    return times


def _chunk_bytes(
    comm: HierarchicalCommunicator, plan: Plan, stopwatch: "Stopwatch", times: Mapping[int, float]
) -> int:
    """Measure the chunk sizes alternately; return the best size, 0 for no chunks. Collective."""
    sizes = chunk_sizes(times)
    if len(sizes) < 2:
        return sum(sizes)
    tensor = torch.zeros(CHUNKED_BYTES // torch.float32.itemsize)
    runs: dict[int, list[float]] = {size: [] for size in sizes}
    for size in RUNS * sizes:
        comm.use(replace(plan, chunk_bytes=size))
        seconds = stopwatch.time(partial(comm.allreduce_by, "levels", tensor), 1)
        runs[size].append(math.inf if seconds is None else seconds)
    return best_chunk(runs)


class Stopwatch:
    """Measures the duration of collectives; all ranks get the same durations.

    Args:
        world: all ranks.
        watch: performs all waits.
    """

    def __init__(self, world: MPI.Intracomm, watch: Watch) -> None:
        self.elapsed_s = 0.0  # seconds from the construction to the end of the latest run
        self._world = world
        self._watch = watch
        self._start = time.perf_counter()

    def time(
        self, run: Callable[[], object], calls: int, *, warm_up: bool = False
    ) -> float | None:
        """Measure ``run``. Collective.

        Args:
            run: the collective to measure.
            calls: number of measured calls.
            warm_up: whether to call ``run`` once before.

        Returns:
            Mean seconds per call on the slowest rank; None if a call failed on any rank.

        Raises:
            RankLostError: a rank was lost.
        """
        seconds, failed = 0.0, False
        try:
            if warm_up:
                run()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            seconds = (time.perf_counter() - start) / calls
        except RankLostError:
            raise
        except (CommError, MemoryError, RuntimeError) as error:
            # torch raises RuntimeError if memory runs out.
            _LOG.debug("an algorithm does not work here: %s", error)
            failed = True
        slowest, failures, self.elapsed_s = self._largest(
            seconds, float(failed), time.perf_counter() - self._start
        )
        return None if failures else slowest

    def _largest(self, *figures: float) -> Sequence[float]:
        """Return the maximum of each of ``figures`` over the ranks."""
        largest = array("d", figures)
        world, buffer = self._world, [largest, MPI.DOUBLE]
        request = requests.start(world, world.Iallreduce, MPI.IN_PLACE, buffer, MPI.MAX)
        wait_request(request, self._watch)
        return largest
