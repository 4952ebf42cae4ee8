"""How ranks wait for each other: a short spin, then sleep, looking for lost ranks meanwhile."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.comm.semaphore import Semaphore
from hpctrain.comm.work import Check

if TYPE_CHECKING:
    from mpi4py import MPI

SPIN_S = 50e-6
"""Peers that do the same work arrive within this time; sleeping costs about as much."""
SLICE_S = 0.1
"""Between two looks for a lost rank."""
_NAP_S = (20e-6, 1e-3)
"""First and longest pause between two tests of an MPI request."""


class NodeBarrier:
    """A barrier of the ranks of one node over semaphores in memory which they share.

    Dissemination: in round k each rank wakes the one 2^k further on and waits for the one 2^k
    before it, so ceil(log2 n) posts per rank. Counting semaphores make it reusable at once: a
    post of the next barrier is counted and not lost.

    Source: Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization".
    """

    def __init__(
        self,
        mine: Sequence[Semaphore],
        next_ones: Sequence[Semaphore],
        *,
        spin: bool,
        check: Check,
    ) -> None:
        """Take the semaphores of each round: ``mine`` to wait for, ``next_ones`` to post."""
        self._rounds = tuple(zip(mine, next_ones, strict=True))
        self._spin_s = SPIN_S if spin else 0.0
        self._check = check

    def wait(self) -> None:
        """Return when all ranks of the node are here."""
        for mine, next_one in self._rounds:
            next_one.post()
            self._take(mine)

    def _take(self, semaphore: Semaphore) -> None:
        if semaphore.try_wait():
            return
        end = time.perf_counter() + self._spin_s
        while time.perf_counter() < end:
            if semaphore.try_wait():
                return
        while not semaphore.wait(SLICE_S):
            self._check()


def wait_request(request: "MPI.Request", check: Check) -> None:
    """Return when an MPI request is complete, without burning the core while a peer is late."""
    if request.Test():
        return
    end = time.perf_counter() + SPIN_S
    while time.perf_counter() < end:
        if request.Test():
            return
    nap, longest = _NAP_S
    next_check = time.perf_counter() + SLICE_S
    while not request.Test():
        time.sleep(nap)
        nap = min(1.5 * nap, longest)
        if time.perf_counter() > next_check:
            check()
            next_check = time.perf_counter() + SLICE_S
