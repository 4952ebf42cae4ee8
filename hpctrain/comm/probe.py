"""Measures which algorithm is fastest here, in a few tenths of a second, and refines the plan.

Every figure is that of the slowest rank, and every decision follows from figures that all ranks
have: they go through the same runs and come to the same plan.
"""

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from mpi4py import MPI

from hpctrain.comm.choice import SIZES, candidates, expected_s, refine
from hpctrain.comm.hierarchical import HierarchicalCommunicator
from hpctrain.comm.measurement import Measurement
from hpctrain.comm.ops import Op, combination
from hpctrain.comm.plan import Plan
from hpctrain.comm.waiting import wait_request
from hpctrain.comm.watch import Watch
from hpctrain.errors import CommError, RankLostError
from hpctrain.units import MIB

BUDGET_S = 0.3
"""What the whole probe may take."""
RAIL_SHARE = 0.6
"""Of the budget, for the rails; the rest is for tensors."""
RUNS = 3
"""Timed runs of a candidate."""
MOST_CALLS = 8
"""Calls in a run: as many as make a MiB, within this bound."""

RunBy = Callable[[str, torch.Tensor], object]
"""Sums a flat tensor by the algorithm of this name."""

_LOG = logging.getLogger(__name__)


def measure(
    comm: HierarchicalCommunicator,
    world: MPI.Intracomm,
    plan: Plan,
    watch: Watch,
    budget_s: float = BUDGET_S,
) -> Plan:
    """Measure, and make ``comm`` use the plan that follows. Collective.

    Also opens the connections between ranks, so that the first step need not.

    Args:
        comm: of all ranks, joined with ``plan``.
        world: the same ranks; carries the figures.
        plan: chosen by rule.
        watch: looks at the others during waits.
        budget_s: seconds after which nothing more is measured; sizes that were not reached keep
            what the rule says.

    Returns:
        The plan with refined tables and all measurements.

    Raises:
        RankLostError: a rank was lost meanwhile.
    """
    how = combination(torch.float32, Op.SUM)
    rail = comm.rail

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
    for num_bytes in SIZES[what]:
        values = torch.zeros(num_bytes // torch.float32.itemsize)
        calls = max(1, min(MOST_CALLS, MIB // num_bytes))
        figures: dict[str, list[float]] = {}
        # In turns: what else this machine does for a while then hits all candidates alike.
        for algorithm in RUNS * candidates(what, num_bytes, plan):
            expected = expected_s(times.get(algorithm, {}), num_bytes)
            expected = figures.get(algorithm, [expected])[-1]
            if algorithm in failed or stopwatch.elapsed_s + (calls + 1) * expected > until_s:
                continue
            seconds = stopwatch.time(partial(run_by, algorithm, values), calls)
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


class Stopwatch:
    """Times what all ranks do together; shows the same on all of them."""

    def __init__(self, world: MPI.Intracomm, watch: Watch) -> None:
        self.elapsed_s = 0.0
        """Seconds since the stopwatch was made, at the end of the latest run."""
        self._world = world
        self._watch = watch
        self._start = time.perf_counter()

    def time(self, run: Callable[[], object], calls: int) -> float | None:
        """Call ``run`` once, and then ``calls`` times by the clock. Collective.

        Returns:
            The mean seconds of a call, of the slowest rank; None where it failed on any.

        Raises:
            RankLostError: a rank was lost meanwhile.
        """
        seconds, failed = 0.0, False
        try:
            run()  # lets the ranks meet, and opens what the first call has to open
            start = time.perf_counter()
            for _ in range(calls):
                run()
            seconds = (time.perf_counter() - start) / calls
        except RankLostError:
            raise
        except (CommError, MemoryError) as error:
            _LOG.debug("an algorithm cannot be had here: %s", error)
            failed = True
        slowest, failures, self.elapsed_s = self._largest(
            seconds, float(failed), time.perf_counter() - self._start
        )
        return None if failures else slowest

    def _largest(self, *figures: float) -> Sequence[float]:
        """Return the largest figure of any rank, for each of ``figures``."""
        largest = array("d", figures)
        request = self._world.Iallreduce(MPI.IN_PLACE, [largest, MPI.DOUBLE], MPI.MAX)
        wait_request(request, self._watch)
        return largest
