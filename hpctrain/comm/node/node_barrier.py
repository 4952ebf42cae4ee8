"""The barrier of the ranks of a node: semaphores in shared memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from hpctrain.comm.flight_recorder import Call
from hpctrain.comm.node.kernel import DONE, FAILED, LATE, Kernel, Sum, library, why_off
from hpctrain.comm.node.segments import LINE_BYTES, Semaphore
from hpctrain.comm.ops import Combination
from hpctrain.comm.waiting import IN_NODE, SPIN_S, Watch
from hpctrain.core.libc import Segment

if TYPE_CHECKING:
    from hpctrain.comm.rail.rail import InFlight

OVERSUBSCRIBED = IN_NODE._replace(spin_s=0.0, yield_s=200e-6)
"""Pace if ranks outnumber cores: a rank that yields its core resumes sooner than a sleeping
rank."""
FEW = 8  # largest number of ranks for one round, which is faster than several for few ranks


class NodeBarrier:
    """Barrier of the ranks that map ``segments``.

    Up to ``FEW`` ranks have one round: each rank posts the semaphores of all other ranks, and
    waits for one post of its own semaphore by each of them. With more ranks, in round k rank r
    posts the semaphore of rank r + 2^k and waits for the post of rank r - 2^k, modulo n:
    ceil(log2(n)) rounds. A semaphore counts posts, so a post of the next barrier is not lost: a
    rank posts it only after all ranks have begun this barrier. All ranks must have created the
    barrier before any waits.

    Args:
        segments: zeroed memory of each rank, by rank.
        rank: this rank.
        first_byte: offset of the semaphores, ``num_bytes(n)`` bytes, in each segment.
        watch: performs all waits.
        spin: whether each rank has its own core, so that short waits may spin.

    Source: Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization".
    """

    def __init__(
        self, segments: Sequence[Segment], rank: int, first_byte: int, watch: Watch, *, spin: bool
    ) -> None:
        self.pace = IN_NODE if spin else OVERSUBSCRIBED
        self._watch = watch
        self._meanwhile: InFlight | None = None
        size = len(segments)
        places = range(first_byte, first_byte + self.num_bytes(size), LINE_BYTES)
        steps = [range(1, size)] if size <= FEW else [[1 << k] for k in range(len(places))]
        self._rounds = tuple(
            tuple(Semaphore(segments[(rank + step) % size], byte) for step in (0, *of_round))
            for of_round, byte in zip(steps, places, strict=False)
        )
        """By round: the semaphore to wait for, and the semaphores to post."""
        for mine, *_ in self._rounds:
            mine.initialise()
        self.kernel: Kernel | None = None  # set by ``use_kernel``; None if it is off

    def use_kernel(self, rank: int, memory: Sequence[int], slot_bytes: int) -> None:
        """Load the kernel, unless it is off, and use it in this barrier.

        Args:
            rank: this rank.
            memory: addresses of the cells, the sign and the slots of each rank; see ``Kernel``.
            slot_bytes: size of a slot.
        """
        functions = None if why_off() else library()
        if functions is not None:
            size, phases_s = len(memory) - 2, (self.pace.spin_s, self.pace.yield_s)
            rounds = [semaphore.address for round_ in self._rounds for semaphore in round_]
            kernel = Kernel(functions, rank, size, phases_s, [*memory, *rounds], slot_bytes)
            self.kernel = kernel if kernel.code == DONE else None

    def sum_of(
        self, kind: int, call: Call, how: Combination, numel: int, scale: float | None
    ) -> Sum | None:
        """Return ``Kernel.sum_of``, or None if the kernel is off or does not support the sum."""
        kernel, number = self.kernel, how.kernel_number
        if kernel is None or number < 0:
            return None
        return kernel.sum_of(kind, call.number, number, numel, scale)

    def finish(self, code: int) -> int:
        """Wait until a call of the kernel is complete; return its code.

        Raises:
            CommError: the communicator of ``watch`` has failed on a rank of the node.
        """
        if code == LATE and (kernel := self.kernel) is not None:
            self._watch.wait(kernel.is_over, self.pace.after(SPIN_S), sleep=kernel.is_over)
            code = kernel.code
        if code == FAILED:
            self._watch.require_in_step()
        return code

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Return the size of the semaphores of one rank in bytes."""
        return (num_ranks - 1).bit_length() * LINE_BYTES

    @contextmanager
    def busy(self, work: "InFlight") -> Iterator[None]:
        """Poll the reductions ``work`` while this rank waits in the barrier. Not collective."""
        self._meanwhile = work
        try:
            yield
        finally:
            self._meanwhile = None

    def wait(self) -> None:
        """Wait until all ranks have called this method.

        Raises:
            CommError: the communicator of ``watch`` has failed on a rank of the node.
        """
        meanwhile = self._meanwhile
        if self.kernel is not None and meanwhile is None:
            self.finish(self.kernel.barrier())
            return
        for mine, *others in self._rounds:
            for other in others:
                other.post()
            for _ in others:
                if mine.try_wait():
                    continue
                if meanwhile is None:
                    self._watch.wait(mine.try_wait, self.pace, sleep=mine.wait)
                else:
                    poll = partial(_polled, meanwhile, mine)
                    self._watch.wait(poll, meanwhile.pace(), sleep=mine.wait)
        # A rank that failed in the barrier may have changed its bucket afterwards.
        if self._watch.sign[0]:
            self._watch.require_in_step()


def _polled(work: "InFlight", mine: Semaphore) -> bool:
    work.poll()
    return mine.try_wait()
