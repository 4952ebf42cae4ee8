"""Measures which algorithm is fastest here, in a few tenths of a second, and refines the plan.

Every figure is that of the slowest rank, and every decision follows from figures that all ranks
have: they go through the same runs and come to the same plan.
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

BUDGET_S = 0.3  # what the tables may take
RAIL_SHARE = 0.6  # of the budget, for the rails; the rest is for tensors
BATCHING_SHARE = 0.3  # of the budget, and beside it, for what fusion and cycle follow from
BATCHING_RUNS = 9  # of each size; the shortest counts
RUNS = 3  # timed runs of a candidate
RUN_S = 1e-3  # what a run should take: a call that is faster is repeated in it
MOST_CALLS = 8  # calls in a run at most
FIRST_SHARE = 1 / 3
"""Of the time for one kind, for its smallest size, where there is least to gain."""

RunBy = Callable[[str, torch.Tensor], object]  # sums a flat tensor by the algorithm of this name

_LOG = logging.getLogger(__name__)


def measure_horovod(
    comm: HorovodCommunicator,
    world: MPI.Intracomm,
    plan: Plan,
    watch: Watch,
    budget_s: float = BUDGET_S,
) -> Plan:
    """Measure Horovod's flat and two-level sums; make ``comm`` use the faster. Collective.

    Returns the plan that follows. ``RankLostError`` if a rank was lost meanwhile.
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
    """Measure, and make ``comm`` use the plan that follows, which is returned. Collective.

    Also opens the connections between ranks, so that the first step need not. Sizes that
    ``budget_s`` seconds do not reach keep what the rule says. ``RankLostError`` if a rank was lost
    meanwhile.
    """
    how = combination(torch.float32, Op.SUM)
    rail = comm.internode

    def over_rail(algorithm: str, part: torch.Tensor) -> None:
        if rail is not None:  # ranks without a rail wait for the figures
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
    """Time the candidates for all sizes, until the stopwatch shows ``until_s``. Collective."""
    times: dict[str, dict[int, float]] = {}
    measured: list[Measurement] = []
    failed: set[str] = set()
    begin_s = stopwatch.elapsed_s
    for num_bytes in SIZES[what]:
        is_first = num_bytes == SIZES[what][0]
        end_s = begin_s + FIRST_SHARE * (until_s - begin_s) if is_first else until_s
        values = torch.zeros(num_bytes // torch.float32.itemsize)
        figures: dict[str, list[float]] = {}
        # In turns: what else this machine does for a while then hits all candidates alike.
        for algorithm in RUNS * candidates(what, num_bytes, plan):
            if algorithm in failed:
                continue
            runs = figures.get(algorithm, [])
            expected = runs[-1] if runs else expected_s(times.get(algorithm, {}), num_bytes)
            calls = max(1, min(MOST_CALLS, int(RUN_S / expected))) if runs else 1
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
    """Time ordinary all-reduces by the plan that ``comm`` uses. Collective.

    Returns the shortest time for each size of ``BATCHING_SIZES``; sizes that were not reached
    until the stopwatch shows ``until_s`` are missing.
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
    """Time chunks of each size that is worth it, in turns; 0 for none. Collective."""
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
    """Times what all ranks do together; shows the same on all of them."""

    def __init__(self, world: MPI.Intracomm, watch: Watch) -> None:
        self.elapsed_s = 0.0  # seconds since the stopwatch was made, at the end of the latest run
        self._world = world
        self._watch = watch
        self._start = time.perf_counter()

    def time(
        self, run: Callable[[], object], calls: int, *, warm_up: bool = False
    ) -> float | None:
        """Call ``run`` so many times by the clock; with ``warm_up`` once before. Collective.

        Returns the mean seconds of a call, of the slowest rank; None where it failed on any.
        ``RankLostError`` if a rank was lost meanwhile.
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
        except (CommError, MemoryError, RuntimeError) as error:  # torch's for want of memory
            _LOG.debug("an algorithm cannot be had here: %s", error)
            failed = True
        slowest, failures, self.elapsed_s = self._largest(
            seconds, float(failed), time.perf_counter() - self._start
        )
        return None if failures else slowest

    def _largest(self, *figures: float) -> Sequence[float]:
        """Return the largest figure of any rank, for each of ``figures``."""
        largest = array("d", figures)
        world, buffer = self._world, [largest, MPI.DOUBLE]
        request = requests.start(world, world.Iallreduce, MPI.IN_PLACE, buffer, MPI.MAX)
        wait_request(request, self._watch)
        return largest
