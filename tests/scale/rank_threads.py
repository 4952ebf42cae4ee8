"""A thread per simulated rank; one thread runs at a time, in a reproducible order."""

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tests.scale.network import Network

T = TypeVar("T")

LOOK_S = 0.1  # virtual time that passes if no rank can continue
STACK_BYTES = 1 << 20


class RankDied(BaseException):
    """Ends the thread of a rank that ``RankThreads.kill`` has killed."""


class DeadlockError(BaseException):
    """No rank can continue, and the time of ``patience_s`` has passed."""


class RankThreads:
    """Runs a function on all ranks; a rank that waits lets the next rank run.

    Args:
        network: its events are performed if no rank can run; holds the virtual time.
        state: module and name of each global variable that every rank has for itself, and a
            function that returns its first value.
        patience_s: longest virtual time in which no rank can run, for example because all wait for
            a lost rank.
    """

    def __init__(
        self,
        network: Network,
        state: "tuple[tuple[object, str, Callable[[], object]], ...]",
        patience_s: float,
    ) -> None:
        self.network, self._state, self._patience_s = network, state, patience_s
        size = network.size
        self._states = [[first() for _, _, first in state] for _ in range(size)]
        self._batons = [threading.Lock() for _ in range(size)]
        self._ready: deque[int] = deque(range(size))
        self._is_ready = [True] * size
        self._waiting: set[int] = set()
        self._looking: set[int] = set()
        self._killed: set[int] = set()
        self._idle_s, self._is_over = 0.0, threading.Event()
        self._num_left = size
        self.rank = -1
        """The rank that runs."""
        self.results: list[object] = [None] * size
        """Result of each rank, or the error that has ended it."""
        self.on_death: Callable[[int], object] = lambda _: None

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Return the results of ``work(rank)`` of all ranks; raise the first error of a rank.

        The result of a rank that was killed is a ``RankDied``.
        """
        threads = []
        before = threading.stack_size(STACK_BYTES)
        try:
            for rank, baton in enumerate(self._batons):
                baton.acquire()
                threads.append(threading.Thread(target=self._run, args=(rank, work), daemon=True))
                threads[-1].start()
        finally:
            threading.stack_size(before)
        kept = [getattr(module, name) for module, name, _ in self._state]
        self._pass_on()
        self._is_over.wait()
        for thread in threads:
            thread.join()
        for (module, name, _), value in zip(self._state, kept, strict=True):
            setattr(module, name, value)
        errors = [one for one in self.results if isinstance(one, BaseException)]
        for error in errors:
            if not isinstance(error, RankDied | DeadlockError):
                raise error
        for error in errors:
            if isinstance(error, DeadlockError):
                raise error
        return self.results

    def _run(self, rank: int, work: Callable[[int], object]) -> None:
        self._batons[rank].acquire()
        try:
            self._resume(rank)
            self.results[rank] = work(rank)
        except BaseException as error:
            self.results[rank] = error
        self._num_left -= 1
        self._leave(rank)
        self._pass_on()

    def park(self) -> bool:
        """Let other ranks run; return True if this rank continues because time has passed."""
        rank = self.rank
        self._waiting.add(rank)
        self._leave(rank)
        self._pass_on()
        self._batons[rank].acquire()
        self._waiting.discard(rank)
        self._resume(rank)
        has_looked = rank in self._looking
        self._looking.discard(rank)
        return has_looked

    def wake(self, rank: int) -> None:
        """Let a waiting rank test again what it waits for."""
        self._idle_s = 0.0
        self._make_ready(rank)

    def kill(self, rank: int) -> None:
        """End a rank at its next wait; it sends nothing from now on."""
        self._killed.add(rank)
        self.network.lost.add(rank)
        self.on_death(rank)
        if rank == self.rank:
            raise RankDied
        self.wake(rank)

    def wait_until(
        self, done: Callable[[], object], look: Callable[[float], object], timeout_s: float
    ) -> bool:
        """Replace ``waiting.wait_until``; ``look`` is called when only time has passed."""
        clocks, rank = self.network.clocks, self.rank
        start = clocks[rank]
        while not done():
            if clocks[rank] - start >= timeout_s:
                return False
            if self.park():
                look(clocks[rank] - start)
        return True

    def _make_ready(self, rank: int) -> None:
        if rank in self._waiting and not self._is_ready[rank]:
            self._is_ready[rank] = True
            self._ready.append(rank)

    def _leave(self, rank: int) -> None:
        self._states[rank] = [getattr(module, name) for module, name, _ in self._state]

    def _resume(self, rank: int) -> None:
        self.rank = rank
        for (module, name, _), value in zip(self._state, self._states[rank], strict=True):
            setattr(module, name, value)
        if rank in self._killed:
            raise RankDied
        if self._idle_s > self._patience_s:
            raise DeadlockError(f"rank {rank} waits for ever: {stack_of_waits()}")

    def _pass_on(self) -> None:
        """Let the next rank run."""
        while not self._ready:
            if not self._num_left:
                self._is_over.set()
                return
            if not self.network.step():
                self._let_time_pass()
        following = self._ready.popleft()
        self._is_ready[following] = False
        self._batons[following].release()

    def _let_time_pass(self) -> None:
        self._idle_s += LOOK_S
        clocks = self.network.clocks
        now = max(clocks[rank] for rank in self._waiting) + LOOK_S
        for rank in sorted(self._waiting):
            clocks[rank] = now
            self._looking.add(rank)
            self._make_ready(rank)


def stack_of_waits() -> str:
    """Return the names of the functions that the caller is in."""
    names, frame = [], sys._getframe(1)
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return " < ".join(names)
