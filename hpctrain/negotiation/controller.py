"""The named operations of one process set: in any order on any rank, in one order on all."""

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from hpctrain.comm.communicator import Owner
from hpctrain.comm.eager import eager
from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.core.errors import CommError, HorovodInternalError, RankLostError
from hpctrain.core.units import MIB
from hpctrain.negotiation.handle import Handle, Take
from hpctrain.negotiation.progress_engine import JOIN, BreakOff, ProgressEngine
from hpctrain.negotiation.progress_thread import ProgressThread
from hpctrain.negotiation.request import Kind, Request, Result

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.negotiation.stall import StallWatch
    from hpctrain.negotiation.timeline import Timelines

_CLOSE = "<close>"
"""The name of the last operation of all."""
_CLOSE_S = 10.0
"""Longest wait at the end for ranks whose operations have broken down."""


class Controller:
    """Takes requests from any thread and carries each out once all ranks have made it."""

    def __init__(
        self,
        comm: "Communicator",
        *,
        fusion_bytes: int = 64 * MIB,
        cycle_s: float = 0.0,
        timeout_s: float = float("inf"),
        timelines: "Timelines | None" = None,
        stalls: "StallWatch | None" = None,
    ) -> None:
        """Make mailboxes. Collective over ``comm``: nobody else may use it, ``close`` closes it.

        Operations wait ``cycle_s`` for others to travel with, unless somebody waits for them, and
        at most ``timeout_s`` for other ranks.
        """
        self.comm = comm
        self._post, self._stalls = comm.mail(), stalls
        self._progress = ProgressEngine(
            comm, self._post, fusion_bytes=fusion_bytes, timelines=timelines, stalls=stalls
        )
        self._driver = ProgressThread(
            self._progress,
            self._post,
            cycle_s=cycle_s,
            timeout_s=timeout_s,
            has_thread=comm.size > 1 and calls_from_threads(),
        )
        self._is_open = True
        self._refusal: HorovodInternalError | None = None
        """Why nothing more is taken on this rank, though others may not know yet."""
        self._owner = Owner()

    @eager
    def submit(self, request: Request, take: Take | None = None) -> Handle:
        """Start an operation; ``take`` makes what its handle gives of the result.

        Where ``NUM_UNNAMED`` operations without a name are under way it waits for the first.

        Raises:
            DuplicateNameError: an operation of this name is under way on this rank.
        """
        handle = Handle(self._driver, request, take=take)
        self._enter(handle)
        self._driver.nudge()
        return handle

    @eager
    def run(self, request: Request) -> Result:
        """Start an operation and wait for its result."""
        handle = Handle(self._driver, request)
        self._enter(handle)
        result: Result = handle.wait()
        return result

    def start_join(self) -> Handle:
        """Take part in everything with nothing until all ranks do; the result is the last to come.

        Where MPI takes calls from several threads this goes on without anybody who waits.
        """
        handle = Handle(self._driver, Request(Kind.BARRIER, None, ()), JOIN)
        self._enter(handle)
        self._driver.nudge()
        return handle

    def break_off(self, reason: str) -> None:
        """Let all that is under way fail on every rank, and all that comes. Not collective.

        A new controller on the same communicator goes on, see ``abandon``.
        """
        self._refusal = HorovodInternalError(reason)
        self._progress.to_ask.append(BreakOff(reason))
        self._driver.nudge()

    def close(self) -> None:
        """End; what only some ranks have submitted fails. Collective; no error on any rank."""
        if self._owner.is_here:  # a forked child has no part in it
            self.abandon()
            self.comm.close()

    def abandon(self) -> None:
        """Do what ``close`` does, but leave the communicator to another controller. Collective."""
        if not self._is_open:
            return
        self._is_open = False
        self._refusal = self._refusal or HorovodInternalError(
            "the process set was shut down; call hpctrain.init() or add_process_set() again"
        )
        self._finish_decided()
        self._progress.shut_down()
        self._driver.close()
        self._post.close()

    def _finish_decided(self) -> None:
        """Carry out what has been decided: the others do, and would wait for this rank."""
        since = time.monotonic()

        def check() -> None:
            if time.monotonic() - since > _CLOSE_S:
                raise RankLostError("some rank has broken down and does not close with the others")

        last = Handle(self._driver, Request(Kind.BARRIER, None, ()), _CLOSE)
        self._progress.closing = last
        self._enter(last)
        with suppress(CommError):
            self._driver.until(lambda: last.is_done, check)

    def _enter(self, handle: Handle) -> None:
        self._owner.check()
        if self._stalls is not None:
            self._stalls.last_call.enter()
        progress = self._progress
        refusal = progress.broken or self._refusal
        if refusal is not None and handle is not progress.closing:
            raise refusal
        if handle.name is JOIN:
            progress.news.append(handle)
        else:
            while (other := progress.enter(handle)) is not None:
                self._driver.finish(other)
        if progress.broken is not None:  # meanwhile
            progress.fail_all(progress.broken)
