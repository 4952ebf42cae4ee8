"""Detection of ranks that died or left, by the ranks that wait for them."""

import math
import os
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import NamedTuple

from hpctrain.cluster.process import STOPPED, birth, stat
from hpctrain.comm import requests
from hpctrain.comm.mpi_start import MPI, is_loss
from hpctrain.comm.owner import Owner
from hpctrain.comm.survivors import use
from hpctrain.comm.waiting import Pace, wait_until
from hpctrain.core.errors import RankLostError
from hpctrain.core.units import format_ranks

GRACE_S = 1.0
"""How long a rank that leaves waits for the others before it reports that it has left."""
LOOK_S = 0.1  # between two checks of the processes of this node
PEERS_PER_LOOK = 16
"""Processes per check, which bounds its cost on nodes with hundreds of ranks."""
NEAR_SIZE = 64
"""Up to this many ranks, a rank reports to all others; in larger worlds to distances of 2^k."""

CLOSE_S = 30.0
"""Longest wait for another rank after all ranks have reached the end of the program."""

BREAK_S = 2.0
"""How long ranks wait for the program to end after a rank has left a block by an error."""

_LEFT, _BROKE_OFF, _AT_END, _FAILED, _CALL = 1, 2, 3, 4, 5
_WORLD = 0  # number of the block that every rank is always in
_REASON_BYTES = 1000
Gather = Callable[[bytes], list[bytes]]
"""Returns the bytes of all ranks, by rank. Collective."""

_FAREWELL = Pace(spin_s=0.0, shortest_s=50e-6, longest_s=20e-3)


class Block(NamedTuple):
    """A block of the program that all ranks leave together."""

    name: str  # for messages
    count_steps: Callable[[], int]  # steps that this rank has begun in it


class Liveness:
    """Detects ranks that are gone, without a thread, and without messages unless a rank fails.

    The ranks of a node check each other's processes, so they find a rank that died. A rank that
    leaves too early reports it. Waiting loops call ``check()`` repeatedly, which raises for both.
    """

    def __init__(
        self, control: MPI.Intracomm, node_pids: Mapping[int, int], timeout_s: float = math.inf
    ) -> None:
        """Use ``control``, a duplicate of the world, until ``farewell()`` frees it.

        Args:
            control: only this class sends on it.
            node_pids: processes of the ranks of this node, by rank, in this pid namespace.
            timeout_s: limit of each wait of the farewell.
        """
        self.rank: int = control.rank
        self._timeout_s = timeout_s
        self._control = control
        use(control)
        self._owner = Owner()
        self._born = {r: (p, birth(p)) for r, p in node_pids.items() if r != self.rank}
        if birth(os.getpid()) is None:  # without /proc no process can be checked
            self._born.clear()
        self._to_look: list[int] = []
        self._next_look = 0.0
        self._left: set[int] = set()
        self._num_blocks = 0
        self._blocks = {_WORLD: Block("the program", lambda: 0)}
        """Blocks that this rank is in, by number."""
        self._broken: dict[int, tuple[float, str]] = {}
        """By block: when another rank reported that it left by an error, and the error."""
        self._ending: tuple[int, float] | None = None
        """Block at whose end this rank waits, and since when; infinite after this was reported."""
        self._ends: dict[int, tuple[float, int, int]] = {}
        """By block: when a rank reported that it waits at the end, that rank, and its steps."""
        self._ended: dict[int, int] = {}  # steps after which all ranks ended a block
        self._failed: dict[int, tuple[int, str]] = {}
        """By number of a communicator: a rank on which it has failed, and the text of the error if
        all ranks raise it."""
        self._broke_off_s = -math.inf  # when this rank has left a block by an error
        self._calls: defaultdict[int, dict[int, tuple[int, str]]] = defaultdict(dict)
        """By communicator and rank: the last collective in which the rank waited."""
        self._reports: dict[int, tuple[bytes, requests.MpiRequest]] = {}
        """By rank: the last report to it, at most one of which is in flight."""
        self._reporting = threading.Lock()
        self._open = True
        self._end_s = math.inf  # when all ranks had reached the end, by time.monotonic()

    def check(self, partners: Collection[int] | None = None) -> None:
        """Raise if a rank is gone; cheap enough for every turn of a waiting loop. Not collective.

        Args:
            partners: world ranks that this rank waits for, None for all. Another rank that has
                left the program is no error; a rank that died always is.

        Raises:
            RankLostError: a rank of this node died, a partner left, or a rank left by an error a
                block that this rank is in, or waits at the end of the block after fewer steps.
        """
        if not self._open:
            if time.monotonic() - self._end_s > CLOSE_S:
                raise RankLostError(
                    f"all ranks had reached the end of the program, but rank {self.rank} has "
                    f"waited {CLOSE_S:g} s for another one, which may have ended by an error; see "
                    f"its output"
                )
            return
        self._raise_if_dead()
        try:
            self._hear()
        except MPI.Exception as error:
            if not is_loss(error):
                raise
            raise RankLostError(f"rank {self.rank} stops waiting: {error}") from error
        self._tell_of_end()
        self._raise_if_broken()
        self._raise_if_ahead()
        if left := sorted(self._left if partners is None else self._left & {*partners}):
            raise RankLostError(
                f"{format_ranks(left)} left the program while rank {self.rank} waits for "
                f"{'it' if len(left) == 1 else 'them'}; every rank must make the same calls: "
                f"search for a call under `if rank == 0`, for sys.exit, return or break, and for "
                f"a rank with fewer batches"
            )

    @property
    def is_open(self) -> bool:
        """Whether this rank still checks the others."""
        return self._open

    def stopped(self) -> list[int]:
        """Return the ranks of this node that a signal or a debugger has stopped."""
        found = {rank: stat(pid) for rank, (pid, _) in self._born.items()}
        return [rank for rank, one in found.items() if one and one.state in STOPPED]

    def abandon(self) -> None:
        """Stop checking other ranks, and skip the farewell. Not collective."""
        self._open = False

    @property
    def innermost(self) -> str:
        """Name of the innermost block that this rank is in; empty if none."""
        return self._blocks[max(self._blocks)].name if len(self._blocks) > 1 else ""

    def enter(self, block: Block) -> int:
        """Enter a block and return its number.

        Not collective, but all ranks must enter the same blocks in the same order.
        """
        self._num_blocks += 1
        self._blocks[self._num_blocks] = block
        return self._num_blocks

    @contextmanager
    def at_end(self, number: int) -> Iterator[None]:
        """Report inside this context, after a while, that this rank waits at the end of a block.

        Not collective. A block that has ended may continue, and end again after more steps.
        """
        self._ending = number, time.monotonic()
        try:
            yield
            self._ended[number] = self._blocks[number].count_steps()
        finally:
            self._ending = None

    def leave(self, number: int, error: BaseException | None) -> None:
        """Leave a block; report an error to the ranks that are still in it. Not collective.

        A ``RankLostError`` is reported to all ranks: a rank whose wait has failed is out of step
        with ranks outside the block too.
        """
        name = self._blocks.pop(number).name
        if error is None or not self._open or not self._owner.is_here:
            return
        self._broke_off_s = time.perf_counter()
        reason = f"rank {self.rank} has left a block of {name} by {type(error).__name__}: {error}"
        block = _WORLD if isinstance(error, RankLostError) else number
        text = f"{block} {reason}".encode()[:_REASON_BYTES]
        self._send(text, _BROKE_OFF)

    def report_failure(
        self, number: int, ranks: Sequence[int] | None, reason: str, *, is_own: bool = True
    ) -> None:
        """Report that a communicator has failed, see ``Notices``. Not collective.

        In a small world, where each rank reports to all, failures of other ranks are not repeated.
        """
        members = ranks or range(self._control.size if self._open else 0)
        if self._open and self._owner.is_here and (is_own or len(members) > NEAR_SIZE):
            with suppress(MPI.Exception):  # of a rank that has died
                self._send(f"{number} {reason}".encode()[:_REASON_BYTES], _FAILED, members)

    def failure(self, number: int) -> tuple[int, str] | None:
        """Return a rank on which a communicator has failed, see ``Notices``. Not collective."""
        if self._open:
            try:
                self._hear_of_failures()
            except MPI.Exception as error:
                if not is_loss(error):
                    raise
        return self._failed.get(number)

    def exchange_calls(
        self, number: int, ranks: Sequence[int] | None, call: tuple[int, str], since_s: float
    ) -> Mapping[int, tuple[int, str]]:
        """Report the collective in which this rank waits, see ``Notices``. Not collective.

        A rank that has left a block, or waits at its end, reports nothing: the other ranks raise
        an error about the block instead.
        """
        is_apart = self._broke_off_s > since_s or self._ending is not None
        if is_apart or not self._open or not self._owner.is_here:
            return {}
        message = f"{number} {call[0]} {call[1]}".encode()
        with self._reporting, suppress(MPI.Exception):  # of a rank that has died
            for rank in self._to_tell(ranks or ()):
                last, request = self._reports.get(rank, (b"", None))
                if last != message and (request is None or request.Test()):
                    self._reports[rank] = message, self._start(message, _CALL, rank)
        return dict(self._calls[number])

    def farewell(self, compare: Callable[[Gather], str] = lambda _: "") -> str:
        """Wait until every rank of the world has called this. Collective.

        Sleeps meanwhile, and after a second reports to the other ranks that this one has left:
        ranks that wait for it raise, ranks that work continue and arrive later. No message is in
        flight when it returns, so ``MPI_Finalize`` finds none. A no-op the second time and in
        forked children.

        Args:
            compare: called when all ranks have arrived; may exchange texts by its argument.

        Returns:
            The result of ``compare``.

        Raises:
            RankLostError: names a rank that died, or the ranks that have not arrived in time.

        Source: Hoefler, Siebert and Lumsdaine 2010, "Scalable communication protocols for dynamic
        sparse data exchange", for the end: synchronous sends, then a barrier.
        """
        if not self._open or not self._owner.is_here:
            return ""
        self._open = False
        announce_s = min(GRACE_S, self._timeout_s / 2)
        has_announced = False

        def announce(waited_s: float) -> None:
            nonlocal has_announced
            if waited_s > announce_s and not has_announced:
                has_announced = True
                self._send(b"", _LEFT)
            self._raise_if_dead()

        control = self._control
        self._wait_until(requests.start(control, control.Ibarrier).Test, announce)
        self._left |= {*range(control.size)}
        notices = requests.pending(control)
        self._wait_until(lambda: all(n.Test() for n in notices), lambda _: self._raise_if_dead())
        found = compare(self._gather)
        self._wait_until(requests.start(control, control.Ibarrier).Test, self._look_late)
        self._end_s = time.monotonic()
        requests.free(control)
        return found

    def _gather(self, text: bytes) -> list[bytes]:
        control = self._control
        lengths = array("q", [0] * control.size)
        request = requests.start(control, control.Iallgather, array("q", [len(text)]), lengths)
        self._wait_until(request.Test, self._look_late)
        joined, counts = bytearray(sum(lengths)), lengths.tolist()
        buffers = [text, MPI.BYTE], [joined, counts, MPI.BYTE]
        request = requests.start(control, control.Iallgatherv, *buffers)
        self._wait_until(request.Test, self._look_late)
        ends = list(accumulate(counts))
        return [bytes(joined[end - n : end]) for n, end in zip(counts, ends, strict=True)]

    def _look_late(self, waited_s: float) -> None:
        if waited_s > GRACE_S:  # before that, a rank that is gone may just have ended earlier
            self._raise_if_dead()

    def _wait_until(self, done: Callable[[], bool], look: Callable[[float], None]) -> None:
        def done_and_heard() -> bool:
            is_done = done()
            self._hear()
            return is_done

        if not wait_until(done_and_heard, look, _FAREWELL, timeout_s=self._timeout_s):
            raise RankLostError(self._overdue())

    def _overdue(self) -> str:
        """Return the text of the error about ranks that have not arrived at the farewell."""
        stopped = self.stopped()
        missing = sorted({*self._to_tell(())} - self._left) or stopped
        whom = format_ranks(missing) if missing else "the other ranks, which have arrived as well"
        state = f"; {format_ranks(stopped)} of this node stopped by a signal" if stopped else ""
        return (
            f"all ranks must reach the end of the program within HPCTRAIN_TIMEOUT="
            f"{self._timeout_s:g} s of each other, but rank {self.rank} has waited that long for "
            f"{whom}{state}; see what they do, or set HPCTRAIN_TIMEOUT to more seconds"
        )

    def _send(self, message: bytes, tag: int, members: Sequence[int] = ()) -> None:
        for rank in self._to_tell(members):
            self._start(message, tag, rank)

    def _start(self, message: bytes, tag: int, rank: int) -> requests.MpiRequest:
        return requests.start(self._control, self._control.Issend, message, rank, tag)

    def _to_tell(self, members: Sequence[int]) -> list[int]:
        """Return the ranks that this one reports to, of ``members`` or of all ranks."""
        members = members or range(self._control.size)
        size, here = len(members), members.index(self.rank)
        distances: set[int] = set(range(1, size))
        if size > NEAR_SIZE:
            distances = {s << k for k in range(size.bit_length()) for s in (1, -1)}
        found = {members[(here + distance) % size] for distance in distances}
        return sorted(found - {self.rank})

    def _hear_of_failures(self) -> None:
        while notice := self._control.Improbe(tag=_FAILED):
            rank, text = _receive(notice)
            number, reason = text.split(" ", 1)
            self._failed.setdefault(int(number), (rank, reason))

    def _hear(self) -> None:
        # A matched probe, because two threads of this rank may receive at the same time.
        while notice := self._control.Improbe(tag=_CALL):
            rank, text = _receive(notice)
            of, number, call = text.split(" ", 2)
            self._calls[int(of)][rank] = int(number), call
        while notice := self._control.Improbe(tag=_LEFT):
            self._left.add(_receive(notice)[0])
        while notice := self._control.Improbe(tag=_BROKE_OFF):
            number, reason = _receive(notice)[1].split(" ", 1)
            self._broken.setdefault(int(number), (time.monotonic(), reason))
        while notice := self._control.Improbe(tag=_AT_END):
            rank, text = _receive(notice)
            end, steps = map(int, text.split())
            self._ends[end] = time.monotonic(), rank, steps
        self._hear_of_failures()

    def _tell_of_end(self) -> None:
        if self._ending is None or time.monotonic() - self._ending[1] < BREAK_S:
            return
        number = self._ending[0]
        self._ending = number, math.inf
        text = f"{number} {self._blocks[number].count_steps()}".encode()
        self._send(text, _AT_END)

    def _raise_if_ahead(self) -> None:
        for number, (since, rank, steps) in list(self._ends.items()):
            block = self._blocks.get(number)
            if block is None or steps <= self._ended.get(number, -1):
                continue
            mine = block.count_steps()
            if mine > steps and time.monotonic() - since > BREAK_S:
                raise RankLostError(
                    f"all ranks must take the same number of steps in a block of {block.name}, "
                    f"but rank {rank} waits at its end after {steps} steps and rank {self.rank} "
                    f"is in step {mine}; call skip_step() on a rank that has no batch for a step"
                )

    def _raise_if_broken(self) -> None:
        for number, (since, reason) in list(self._broken.items()):
            # An error that the program does not catch ends all ranks meanwhile, with more detail.
            if number in self._blocks and time.monotonic() - since > BREAK_S:
                raise RankLostError(
                    f"all ranks must leave a block together, but {reason}, and rank {self.rank} "
                    f"waits in {self._blocks[number].name}; catch errors inside the block, or end "
                    f"the program"
                )

    def _raise_if_dead(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        if not self._to_look:
            self._to_look = list(self._born)
        now_due, self._to_look = self._to_look[:PEERS_PER_LOOK], self._to_look[PEERS_PER_LOOK:]
        for rank in now_due:
            pid, born = self._born[rank]
            if born is None or birth(pid) != born:
                raise RankLostError(
                    f"rank {rank} (process {pid} of this node) died while rank "
                    f"{self.rank} waits for it; its last output says why, and the "
                    f"kernel's log if it ran out of memory"
                )


def _receive(notice: MPI.Message) -> tuple[int, str]:
    """Return the sender of a message, and its text."""
    status, buffer = MPI.Status(), bytearray(_REASON_BYTES)
    notice.Recv([buffer, MPI.BYTE], status)
    text = bytes(buffer[: status.Get_count(MPI.BYTE)])
    return status.Get_source(), text.decode(errors="replace")
