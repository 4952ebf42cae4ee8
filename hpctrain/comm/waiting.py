"""Waiting for other ranks: a short spin, then sleep, with an eye on the others."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from hpctrain.comm.node.semaphore import Semaphore
from hpctrain.comm.watch import Watch

if TYPE_CHECKING:
    from mpi4py import MPI

SPIN_S = 50e-6
"""Peers that do the same work arrive within this time; sleeping costs about as much."""
SLICE_S = 0.1
"""Between two looks at the others."""
NAP_S = (20e-6, 500e-6)
"""Shortest and longest pause between two tests of an MPI request."""
NAP_SHARE = 0.02
"""Pauses are this share of the time waited so far: so late, at most, is the end noticed."""


class MpiRequest(Protocol):
    """Something that is under way, such as a request of MPI."""

    def Test(self, status: "MPI.Status | None", /) -> bool:  # noqa: N802 - MPI's name
        """Say whether it is over."""


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
        watch: Watch,
    ) -> None:
        """Take the semaphores of each round: ``mine`` to wait for, ``next_ones`` to post."""
        self._rounds = tuple(zip(mine, next_ones, strict=True))
        self._spin_s = SPIN_S if spin else 0.0
        self._watch = watch

    def wait(self) -> None:
        """Return when all ranks of the node are here."""
        for mine, next_one in self._rounds:
            next_one.post()
            if not mine.try_wait():
                self._take(mine)

    def _take(self, semaphore: Semaphore) -> None:
        start = time.perf_counter()
        end = start + self._spin_s
        while time.perf_counter() < end:
            if semaphore.try_wait():
                self._watch.waited_s += time.perf_counter() - start
                return
        while not semaphore.wait(SLICE_S):
            self._watch.look(time.perf_counter() - start)
        self._watch.waited_s += time.perf_counter() - start


def wait_request(
    request: MpiRequest,
    watch: Watch,
    partner: int | None = None,
    over: str = "",
    status: "MPI.Status | None" = None,
) -> None:
    """Return when a request is complete, without burning the core while a peer is late.

    Args:
        request: of a non-blocking call of MPI, or another that can be tested.
        watch: looks at the others meanwhile.
        partner: the world rank at the other end, None for all ranks.
        over: the link to it, for messages.
        status: is told what has arrived.
    """
    if request.Test(status):
        return
    start = time.perf_counter()
    end = start + SPIN_S
    while time.perf_counter() < end:
        if request.Test(status):
            watch.waited_s += time.perf_counter() - start
            return
    shortest, longest = NAP_S
    next_look = start + SLICE_S
    now = start
    while not request.Test(status):
        time.sleep(min(max(NAP_SHARE * (now - start), shortest), longest))
        now = time.perf_counter()
        if now > next_look:
            watch.look(now - start, partner, over)
            next_look = now + SLICE_S
    watch.waited_s += time.perf_counter() - start
