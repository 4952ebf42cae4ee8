"""Detection of ranks that died or left, by the ranks that wait for them."""

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from hpctrain.comm import blocks, requests
from hpctrain.comm.blocks import Blocks
from hpctrain.comm.mpi_start import MPI, is_loss
from hpctrain.comm.node_processes import NodeProcesses
from hpctrain.comm.waiting import Pace, wait_until
from hpctrain.comm.watched_calls import gather_bytes
from hpctrain.core.errors import RankLostError
from hpctrain.core.units import format_ranks

GRACE_S = 1.0
"""How long a rank that leaves waits for other ranks before it reports that it has left."""

CLOSE_S = 30.0
"""Longest wait for another rank after all ranks have reached the end of the program."""

Gather = Callable[[bytes], list[bytes]]
"""Returns the bytes of all ranks, by rank. Collective."""

_SEARCH = (
    "search for a call under `if rank == 0`, for sys.exit, return or break, and for a rank with "
    "fewer batches"
)
_END_PACE = Pace(spin_s=0.0, shortest_s=50e-6, longest_s=20e-3)


class Liveness:
    """Detects ranks that died or left, without a thread.

    The ranks of a node check each other's processes, and so detect a rank that died. A rank that
    leaves the program early reports this to the other ranks. Waiting loops repeatedly call
    ``check()``, which raises in both cases. Ranks send no messages while no rank is late.

    Args:
        control: duplicate of the world on which only this class sends; freed by ``wait_for_end``.
        processes: processes of the ranks of this node.
        timeout_s: limit of each wait in ``wait_for_end``.
    """

    def __init__(
        self, control: MPI.Intracomm, processes: NodeProcesses, timeout_s: float = math.inf
    ) -> None:
        self._rank: int = control.rank
        self._timeout_s = timeout_s
        self._control = control
        self._reports = blocks.Reports(control)
        self.processes = processes
        self.blocks = Blocks(self._rank, self._reports)
        self._interrupt = ""
        self._left: dict[int, str] = {}
        """By rank that has left the program: name of the exception that interrupted one of its
        calls before; empty if none."""
        self._failed: dict[int, tuple[int, str]] = {}
        """By number of a communicator: a rank on which it has failed, and the text of the error
        that all ranks raise; empty for other errors."""
        self._calls: defaultdict[int, dict[int, tuple[int, str]]] = defaultdict(dict)
        """By communicator and rank: the last collective in which the rank waited."""
        self._is_abandoned = False
        self._end_s = math.inf  # when all ranks had reached the end, by time.monotonic()

    def check(self, partners: Collection[int] | None = None) -> None:
        """Raise if a rank has died or left. Not collective.

        A waiting loop may call this method in every iteration, since most calls return early.

        Args:
            partners: world ranks that this rank waits for, None for all. Other ranks may have left
                the program, but an error is raised if any rank has died.

        Raises:
            RankLostError: a rank of this node died, a partner left, or another rank has left a
                block of this rank by an error, or waits at the end of such a block after fewer
                steps; or ``abandon`` was called.
        """
        if self._is_abandoned:
            raise RankLostError(
                f"ranks must use communicators of the current world, but rank {self._rank} waits "
                f"in one of an earlier world, which has lost a rank; create a new communicator"
            )
        if not self._reports.is_open:
            if time.monotonic() - self._end_s > CLOSE_S:
                raise RankLostError(
                    f"all ranks must exit within {CLOSE_S:g} s after all have reached the end of "
                    f"the program, but rank {self._rank} still waits for another rank, which may "
                    f"have ended by an error; read the output of the other ranks"
                )
            return
        self.processes.check()
        try:
            self._receive_reports()
        except MPI.Exception as error:
            if not is_loss(error):
                raise
            raise RankLostError(
                f"rank {self._rank} has stopped waiting, because MPI reports a lost rank: {error}"
            ) from error
        self.blocks.check()
        if left := [r for r in sorted(self._left) if partners is None or r in partners]:
            raise RankLostError(self._departure(left))

    def _departure(self, left: Sequence[int]) -> str:
        interrupted = [rank for rank in left if self._left[rank]]
        found, after, remedy = left, "", _SEARCH
        if interrupted:
            found, after = interrupted, f" after {self._left[interrupted[0]]} in a call"
            remedy = "do not catch the interrupt, which then ends all ranks"
        return (
            f"every rank must make the same calls, but {format_ranks(found)} left the program"
            f"{after} while rank {self._rank} waits for {'it' if len(found) == 1 else 'them'}; "
            f"{remedy}"
        )

    @property
    def is_open(self) -> bool:
        """Whether this rank still checks the other ranks."""
        return self._reports.is_open

    def abandon(self) -> None:
        """End all waits of this rank in the world, and make ``wait_for_end`` a no-op.

        Not collective. MPI does not end a wait in node memory. A background save, for example,
        waits there if another survivor did not start the save before the loss.
        """
        self._is_abandoned, self._reports.is_open = True, False

    def report_failure(
        self,
        number: int | None,
        ranks: Sequence[int] | None,
        reason: str,
        failed_on: int | None = None,
    ) -> None:
        """Report to other ranks that a communicator has failed; see ``Notices``. Not collective.

        In a small world each rank reports its own failures to all ranks, so that this rank does
        not forward a failure of another rank.
        """
        is_own = failed_on is None
        if is_own and isinstance(sys.exc_info()[1], KeyboardInterrupt):  # the error of the call
            self._interrupt = "KeyboardInterrupt"
        if number is None:
            return
        members = ranks or range(self._control.size if self._reports.is_open else 0)
        if self._reports.may_send and (is_own or len(members) > blocks.NEAR_SIZE):
            with suppress(MPI.Exception):  # the receiver has died
                rank = self._rank if failed_on is None else failed_on
                self._reports.send(blocks.FAILED, f"{number} {rank} {reason}", members)

    def failure(self, number: int) -> tuple[int, str] | None:
        """Return a rank on which a communicator has failed, and the reason; see ``Notices``."""
        if self._reports.is_open:
            try:
                self._receive_failures()
            except MPI.Exception as error:
                if not is_loss(error):
                    raise
        return self._failed.get(number)

    def exchange_calls(
        self, number: int, ranks: Sequence[int] | None, call: tuple[int, str], since_s: float
    ) -> Mapping[int, tuple[int, str]]:
        """Report the collective in which this rank waits; return the reports of other ranks.

        Not collective; see ``Notices``.

        A rank that has left a block by an error, or waits at the end of a block, reports nothing:
        the other ranks raise an error about the block instead.
        """
        if self.blocks.is_apart(since_s) or not self._reports.may_send:
            return {}
        self._reports.update(blocks.CALL, f"{number} {call[0]} {call[1]}", ranks or ())
        return dict(self._calls[number])

    def wait_for_end(self, compare: Callable[[Gather], str] = lambda _: "") -> str:
        """Wait until every rank of the world has called this method. Collective.

        This rank sleeps during the wait. After a second, this rank reports to the other ranks that
        it has left: ranks that wait for this rank raise, and ranks that compute continue and call
        this method later. No message is in flight on return, as ``MPI_Finalize`` requires. A no-op
        the second time and in forked children.

        Args:
            compare: called when all ranks have arrived, with a collective that gathers bytes.

        Returns:
            The result of ``compare``.

        Raises:
            RankLostError: a rank died, or ranks have not called this method in time.

        Source: Hoefler, Siebert and Lumsdaine 2010, "Scalable communication protocols for dynamic
        sparse data exchange". From this paper: synchronous sends, then a nonblocking barrier.
        """
        if not self._reports.may_send:
            return ""
        self._reports.is_open = False
        announce_s = min(GRACE_S, self._timeout_s / 2)
        has_announced = False

        def announce(waited_s: float) -> None:
            nonlocal has_announced
            if waited_s > announce_s and not has_announced:
                has_announced = True
                self._reports.send(blocks.LEFT, self._interrupt)
            self.processes.check()

        control = self._control
        self._wait_until(requests.start(control, control.Ibarrier).Test, announce)
        self._left |= dict.fromkeys(range(control.size), "")
        notices = requests.pending(control)
        self._wait_until(lambda: all(n.Test() for n in notices), lambda _: self.processes.check())
        found = compare(self._gather)
        self._wait_until(requests.start(control, control.Ibarrier).Test, self._check_if_late)
        self._end_s = time.monotonic()
        requests.free(control)
        return found

    def _gather(self, text: bytes) -> list[bytes]:
        wait = partial(self._wait_until, look=self._check_if_late)
        return [bytes(part) for part in gather_bytes(self._control, text, wait)]

    def _check_if_late(self, waited_s: float) -> None:
        if waited_s > GRACE_S:  # a process that ended earlier may have ended normally
            self.processes.check()

    def _wait_until(self, done: Callable[[], bool], look: Callable[[float], None]) -> None:
        def done_and_received() -> bool:
            is_done = done()
            self._receive_reports()
            return is_done

        if not wait_until(done_and_received, look, _END_PACE, timeout_s=self._timeout_s):
            raise RankLostError(self._overdue())

    def _overdue(self) -> str:
        """Return the error message that names the ranks that have not called ``wait_for_end``."""
        stopped = self.processes.stopped()
        missing = sorted({*self._reports.receivers()} - self._left.keys()) or stopped
        whom = (
            format_ranks(missing)
            if missing
            else "the other ranks, which have reached the end as well"
        )
        state = f"; {format_ranks(stopped)} of this node stopped by a signal" if stopped else ""
        return (
            f"all ranks must reach the end of the program within HPCTRAIN_TIMEOUT="
            f"{self._timeout_s:g} s of each other, but rank {self._rank} has waited that long for "
            f"{whom}{state}; read the output of the late ranks, or set HPCTRAIN_TIMEOUT to more "
            f"seconds"
        )

    def _receive_failures(self) -> None:
        while notice := self._control.Improbe(tag=blocks.FAILED):
            number, rank, reason = _receive(notice)[1].split(" ", 2)
            self._failed.setdefault(int(number), (int(rank), reason))

    def _receive_reports(self) -> None:
        # A matched probe, because two threads of this rank may receive at the same time.
        while notice := self._control.Improbe(tag=blocks.CALL):
            rank, text = _receive(notice)
            of, number, call = text.split(" ", 2)
            self._calls[int(of)][rank] = int(number), call
        while notice := self._control.Improbe(tag=blocks.LEFT):
            rank, interrupt = _receive(notice)
            self._left[rank] = interrupt
        while notice := self._control.Improbe(tag=blocks.BROKE_OFF):
            self.blocks.record_error(_receive(notice)[1])
        while notice := self._control.Improbe(tag=blocks.AT_END):
            self.blocks.record_end(*_receive(notice))
        self._receive_failures()


def _receive(notice: MPI.Message) -> tuple[int, str]:
    """Receive a report; return its sender and its text."""
    status, buffer = MPI.Status(), bytearray(blocks.MAX_BYTES)
    notice.Recv([buffer, MPI.BYTE], status)
    text = bytes(buffer[: status.Get_count(MPI.BYTE)])
    return status.Get_source(), text.decode(errors="replace")
