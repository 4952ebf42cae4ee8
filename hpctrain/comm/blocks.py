"""Blocks of a program that all ranks leave together, such as ``with`` blocks of local SGD.

The other ranks raise an error if a rank leaves a block by an error, or waits at the end of the
block after fewer steps than another rank.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from hpctrain.comm import requests
from hpctrain.comm.mpi_start import MPI
from hpctrain.comm.owner import Owner
from hpctrain.comm.survivors import use
from hpctrain.core.errors import RankLostError

NEAR_SIZE = 64
"""Up to this many ranks, a rank reports to all ranks. In larger worlds, a rank reports to ranks at
distances of 2^k."""
MAX_BYTES = 1000
LEFT, BROKE_OFF, AT_END, FAILED, CALL = 1, 2, 3, 4, 5  # tags of the reports


class Reports:
    """Sends short reports from this rank to other ranks.

    Only the process that created the object sends reports, and only while ``is_open`` is true.
    Sends are synchronous, so that a barrier after their completion proves that none is in flight.

    Args:
        control: a duplicate of the world on which only this class sends.
    """

    def __init__(self, control: MPI.Intracomm) -> None:
        self._control = control
        use(control)
        self._owner = Owner()
        self._latest: dict[int, tuple[bytes, requests.MpiRequest]] = {}
        """By receiver: the last report that ``update`` has sent, and the request of the send."""
        self._updating = threading.Lock()
        self.is_open = True

    @property
    def may_send(self) -> bool:
        """Whether this process may send reports; False in a forked child."""
        return self.is_open and self._owner.is_here

    def send(self, tag: int, text: str = "", members: Sequence[int] = ()) -> None:
        """Send ``text``, cut to ``MAX_BYTES``, to the receivers among ``members``."""
        for rank in self.receivers(members):
            self._start(text.encode()[:MAX_BYTES], tag, rank)

    def update(self, tag: int, text: str, members: Sequence[int]) -> None:
        """Send ``text`` to each receiver that has received the previous report.

        A receiver is skipped if the previous report has the same text. Threads may call this
        method concurrently.
        """
        message = text.encode()
        with self._updating, suppress(MPI.Exception):  # the receiver has died
            for rank in self.receivers(members):
                last, request = self._latest.get(rank, (b"", None))
                if last != message and (request is None or request.Test()):
                    self._latest[rank] = message, self._start(message, tag, rank)

    def _start(self, message: bytes, tag: int, rank: int) -> requests.MpiRequest:
        return requests.start(self._control, self._control.Issend, message, rank, tag)

    def receivers(self, members: Sequence[int] = ()) -> list[int]:
        """Return the ranks of ``members`` to which this rank reports; ``()`` means all ranks."""
        members = members or range(self._control.size)
        size, here = len(members), members.index(self._control.rank)
        distances: set[int] = set(range(1, size))
        if size > NEAR_SIZE:
            distances = {s << k for k in range(size.bit_length()) for s in (1, -1)}
        found = {members[(here + distance) % size] for distance in distances}
        return sorted(found - {self._control.rank})


BREAK_S = 2.0
"""How long ranks wait for the program to end after a rank has left a block by an error."""
_WORLD = 0  # number of the block that every rank is always in


class Block(NamedTuple):
    """A block of the program that all ranks leave together."""

    name: str  # for messages
    count_steps: Callable[[], int]  # steps that this rank has begun in the block


class Blocks:
    """Tracks the blocks that this rank is in, and reports of other ranks about these blocks.

    No method is collective, but all ranks must enter the same blocks in the same order.
    """

    def __init__(self, rank: int, reports: Reports) -> None:
        self._rank, self._reports = rank, reports
        self._num_entered = 0
        self._within = {_WORLD: Block("the program", lambda: 0)}
        self._broken: dict[int, tuple[float, str]] = {}
        """By block number: when a report arrived that another rank left the block by an error, and
        that error."""
        self._ending: tuple[int, float] | None = None
        """Number of the block at whose end this rank waits, and the start of the wait, which is
        set to infinity when the wait is reported."""
        self._ends: dict[int, tuple[float, int, int]] = {}
        """By block number: when a report arrived that a rank waits at the end of the block, the
        rank, and the number of its steps."""
        self._ended: dict[int, int] = {}  # by block number: steps when all ranks last ended it
        self._error_s = -math.inf  # when this rank has left a block by an error

    @property
    def innermost(self) -> str:
        """Name of the innermost block that this rank is in; empty if none."""
        return self._within[max(self._within)].name if len(self._within) > 1 else ""

    def is_apart(self, since_s: float) -> bool:
        """Return True if this rank waits at the end of a block, or left a block by an error.

        Only errors after ``since_s``, a value of ``time.perf_counter()``, count.
        """
        return self._error_s > since_s or self._ending is not None

    def enter(self, block: Block) -> int:
        """Enter a block; return the number of the block, counted from 1."""
        self._num_entered += 1
        self._within[self._num_entered] = block
        return self._num_entered

    @contextmanager
    def at_end(self, number: int) -> Iterator[None]:
        """Mark inside this context that this rank waits at the end of a block.

        If the wait is long, ``check`` reports the wait to the other ranks.

        All ranks may continue a block after its end, and end the block again after more steps.
        """
        self._ending = number, time.monotonic()
        try:
            yield
            self._ended[number] = self._within[number].count_steps()
        finally:
            self._ending = None

    def leave(self, number: int, error: BaseException | None) -> None:
        """Leave a block; report ``error``, if any, to the ranks that are still in the block.

        A ``RankLostError`` is reported to all ranks: after a failed wait, the calls of this rank
        no longer match the calls of other ranks, also outside the block.
        """
        name = self._within.pop(number).name
        if error is None or not self._reports.may_send:
            return
        self._error_s = time.perf_counter()
        reason = f"rank {self._rank} has left a block of {name} by {type(error).__name__}: {error}"
        block = _WORLD if isinstance(error, RankLostError) else number
        self._reports.send(BROKE_OFF, f"{block} {reason}")

    def record_error(self, text: str) -> None:
        """Store the report that another rank has left a block by an error."""
        number, reason = text.split(" ", 1)
        self._broken.setdefault(int(number), (time.monotonic(), reason))

    def record_end(self, rank: int, text: str) -> None:
        """Store the report that ``rank`` waits at the end of a block."""
        number, steps = map(int, text.split())
        self._ends[number] = time.monotonic(), rank, steps

    def check(self) -> None:
        """Report a long wait at the end of a block; check the reports of other ranks.

        Raises:
            RankLostError: another rank has left a block of this rank by an error, or waits at the
                end of such a block after fewer steps than this rank.
        """
        now = time.monotonic()
        if self._ending is not None and now - self._ending[1] >= BREAK_S:
            number = self._ending[0]
            self._ending = number, math.inf
            self._reports.send(AT_END, f"{number} {self._within[number].count_steps()}")
        for number, (since, reason) in list(self._broken.items()):
            # Unless that rank catches its error, all ranks end before, with more details.
            if number in self._within and now - since > BREAK_S:
                raise RankLostError(
                    f"all ranks must leave a block together, but {reason}, and rank {self._rank} "
                    f"waits in {self._within[number].name}; catch errors inside the block, or end "
                    f"the program"
                )
        for number, (since, rank, steps) in list(self._ends.items()):
            block = self._within.get(number)
            if block is None or steps <= self._ended.get(number, -1):
                continue
            mine = block.count_steps()
            if mine > steps and now - since > BREAK_S:
                raise RankLostError(
                    f"all ranks must take the same number of steps in a block of {block.name}, "
                    f"but rank {rank} waits at the end of the block after {steps} steps and rank "
                    f"{self._rank} is in step {mine}; call skip_step() on a rank that has no "
                    f"batch for a step"
                )
