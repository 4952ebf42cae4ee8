"""The named operations of one process set: in any order on any rank, in one order on all.

A waiting caller drives them; else a thread that sleeps in between.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.comm.mpi_start import is_loss
from hpctrain.comm.owner import Owner
from hpctrain.core.errors import CommError, HorovodInternalError, RankLostError
from hpctrain.core.libc import Timer
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.core.units import MIB
from hpctrain.negotiation.pending_table import NUM_SLOTS
from hpctrain.negotiation.progress_engine import CLOSE, JOIN, BreakOff, ProgressEngine
from hpctrain.negotiation.request import (
    Handle,
    Kind,
    ReduceOp,
    Repeated,
    Request,
    Result,
    Take,
    TensorHandle,
    through_host,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hpctrain.comm.communicator import Communicator
    from hpctrain.negotiation.stall import StallWatch
    from hpctrain.negotiation.timeline import Timelines

TICK_S = 1.0  # between two looks for what has lasted too long, and for questions of other ranks
_BURST_S, _MOST_PAUSES = 100e-6, 6
"""Between two operations of a burst, at most; and pauses in it, each twice as long as the last."""
_LONGEST_S = 2e-3
"""Until the thread looks up, where all that it has looked up for lately was waited for."""
_CLOSE_S = 10.0
"""Longest wait at the end for ranks whose operations have broken down, and for a caller whose
operation does not come back."""


class Controller:
    """Takes requests from any thread and carries each out once all ranks have made it.

    One thread at a time drives the ``ProgressEngine``. A caller who waits drives on his own
    thread: no other has to wake up for it. The controller's thread takes over what nobody waits
    for, and lets go as soon as a caller comes.
    """

    def __init__(
        self,
        comm: "Communicator",
        *,
        timelines: "Timelines",
        stalls: "StallWatch",
        fusion_bytes: int = 64 * MIB,
        cycle_s: float = 0.0,
        timeout_s: float = float("inf"),
    ) -> None:
        """Make mailboxes. Collective over ``comm``: nobody else may use it, ``close`` closes it.

        Operations wait ``cycle_s`` for others to travel with, unless somebody waits for them, and
        at most ``timeout_s`` for other ranks.
        """
        self.comm = comm
        self._post, self._stalls = comm.new_mailbox(), stalls
        self._progress = ProgressEngine(
            comm, self._post, fusion_bytes=fusion_bytes, timelines=timelines, stalls=stalls
        )
        self._timeout_s = timeout_s
        self._is_open = self._may_drive = True
        self._refusal: HorovodInternalError | None = None
        """Why nothing more is taken on this rank, though others may not know yet."""
        self._repeated: dict[str, Repeated] = {}
        self._owner = Owner()
        self._lock = threading.Lock()
        self._given_up = threading.Condition(self._lock)
        """Told when nobody drives any more, and when something was carried out."""
        self._is_driven = self._is_asleep = False
        self._num_callers = 0
        self._next_look = time.monotonic() + TICK_S
        self._burst_s = self._delay_s = max(cycle_s, _BURST_S)
        self._timer: Timer | None = None
        """Goes off when what nobody waits for has waited for a burst; set when that begins, and
        left so when that is over: setting it takes as long as an operation."""
        self._is_set = False
        self._thread: threading.Thread | None = None
        if comm.size > 1 and calls_from_threads():
            self._timer = Timer()
            self._thread = threading.Thread(
                target=self._drive_for_nobody, name="hpctrain-named", daemon=True
            )
            self._thread.start()

    @dynamo_disable
    def submit(
        self, request: Request, take: Take | None = None, *, is_awaited: bool = False
    ) -> Handle:
        """Start an operation; ``take`` makes what its handle gives of the result.

        One that ``is_awaited`` at once begins when its handle is waited for.
        ``DuplicateNameError`` if an operation of this name is under way on this rank.
        """
        if not all(tensor.is_cpu for tensor in request.tensors):
            request, take = through_host(request, take)
        handle = Handle(self, request, take=take)
        self._enter(handle, is_awaited=is_awaited)
        return handle

    @dynamo_disable
    def submit_tensor(
        self,
        name: str,
        tensor: "Tensor",
        op: ReduceOp,
        prescale: float,
        postscale: float,
        *,
        is_awaited: bool = False,
    ) -> Handle | None:
        """Start a reduction in place that was started as such before; None if none was.

        ``name`` is what ``repeat`` was told; see ``submit``.
        """
        repeated = self._repeated.get(name)
        if repeated is None or not repeated.fits(tensor, op, prescale, postscale):
            return None
        handle = TensorHandle(self, repeated, tensor)
        self._enter(handle, is_awaited=is_awaited)
        return handle

    def repeat(self, name: str, request: Request) -> None:
        """Know a reduction in place of one tensor again, by the name that the user gave."""
        if len(self._repeated) >= NUM_SLOTS:
            self._repeated.clear()
        assert request.name is not None
        self._repeated[name] = Repeated(request.name, request.signature)

    @dynamo_disable
    def run(self, request: Request) -> Result:
        """Start an operation and wait for its result."""
        try:
            result: Result = self.submit(request, is_awaited=True).wait()
        except BaseException as error:
            self._fail_after(error)
            raise
        return result

    def start_join(self) -> Handle:
        """Take part in everything with nothing until all ranks do; the result is the last to come.

        Where MPI takes calls from several threads this goes on without anybody who waits.
        """
        handle = Handle(self, Request(Kind.BARRIER, None, ()), JOIN)
        self._enter(handle)
        return handle

    def break_off(self, reason: str) -> None:
        """Let all that is under way fail on every rank, and all that comes. Not collective.

        A new controller on the same communicator goes on, see ``abandon``.
        """
        self._refusal = HorovodInternalError(reason)
        self._progress.to_ask.append(BreakOff(reason))
        self._nudge()

    def refuse(self, reason: str) -> None:
        """Take nothing more on this rank; empty for all again. Not collective."""
        self._refusal = HorovodInternalError(reason) if reason else None

    @property
    def is_broken(self) -> bool:
        """Whether nothing goes on any more on this rank, though others may not know."""
        return self._progress.broken is not None

    def give_up(self) -> None:
        """Let the end come without a last operation. Collective."""
        self._progress.shut_down()

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
        # What has been decided the others carry out, and would wait for this rank.
        last = self._progress.closing = Handle(self, Request(Kind.BARRIER, None, ()), CLOSE)
        self._enter(last, is_awaited=True)
        with suppress(CommError):
            self.finish(last, _CLOSE_S)
        self._progress.shut_down()
        self._end_driving()
        self._post.close()

    @dynamo_disable
    def finish(self, handle: Handle, timeout_s: float | None = None) -> None:
        """Return when an operation is done; drive until then, unless another thread does.

        ``RankLostError`` if it was not done within ``timeout_s``, by default that of all.
        """
        try:
            self._start(handle)
            if not handle.is_done:
                self._await(handle, self._timeout_s if timeout_s is None else timeout_s)
        except BaseException:
            if not handle.is_done:  # the caller may use its tensors again
                self.comm.fail()
            raise

    def _await(self, handle: Handle, limit_s: float) -> None:
        since = time.monotonic()

        def is_over() -> bool:
            if not handle.is_done and (waited_s := time.monotonic() - since) > limit_s:
                raise RankLostError(
                    f"rank {self.comm.rank} has waited {waited_s:.0f} s for the others to "
                    f"submit {handle.name}, longer than HPCTRAIN_TIMEOUT={limit_s:g} "
                    f"allows; see what they do, or set HPCTRAIN_TIMEOUT to more seconds"
                )
            return handle.is_done

        with self._given_up:
            self._num_callers += 1
        drives = False
        try:
            with self._given_up:
                while self._is_driven and not is_over():
                    self._post.ring()
                    self._given_up.wait(TICK_S)
                if not is_over():
                    self._is_driven = drives = True
            if drives:
                self._drive(is_over)
        finally:
            with self._given_up:
                self._num_callers -= 1
                self._pass_on(drives=drives)

    def look(self) -> None:
        """Do what can be done without waiting, where there is no thread for it."""
        with self._given_up:
            if self._is_driven or self._thread is not None:
                return
            self._is_driven = True
        try:
            self._drive(lambda: True)
        finally:
            with self._given_up:
                self._pass_on(drives=True)

    def _fail_after(self, error: BaseException) -> None:
        """Fail the communicator after an interrupt: the caller may use its tensors again."""
        if not isinstance(error, CommError):
            self.comm.fail()

    def _enter(self, handle: Handle, *, is_awaited: bool = False) -> None:
        self._owner.check()
        self._stalls.last_call.enter()
        progress = self._progress
        refusal = progress.broken or self._refusal
        if refusal is not None and handle is not progress.closing:
            raise refusal
        try:
            progress.enter(handle)
            if progress.broken is not None:  # meanwhile
                progress.fail_all(progress.broken)
            if not is_awaited:
                self._nudge()
        except BaseException as error:
            self._fail_after(error)
            raise

    def _nudge(self) -> None:
        """See to what has just been submitted, without waiting for it."""
        if self._is_driven:
            if self._is_asleep:
                self._post.ring()
        elif self._timer is None:
            self.look()
        elif not self._is_set:
            with self._lock:
                self._set_timer(self._timer)

    def _set_timer(self, timer: Timer) -> None:
        """Let the thread see to what is under way, unless somebody waits for it before."""
        self._is_set = True
        timer.set(self._delay_s)

    def _start(self, handle: Handle) -> None:
        """Carry out a repeated operation, or begin to, where nothing else is under way here."""
        progress = self._progress
        if progress.fast_path is None:
            return
        with self._lock:
            if self._is_driven or self._num_callers:
                return
            self._is_driven = True
        try:
            progress.start(handle)
        except BaseException as error:  # the others may go on with this rank or not
            progress.break_down(error)
            raise
        finally:
            with self._lock:
                self._pass_on(drives=True)

    def drop(self) -> None:
        """End without the others, who may be lost. Not collective."""
        self._is_open = False
        self._refusal = self._refusal or HorovodInternalError("ranks of this process set are lost")
        self._progress.shut_down()
        self._end_driving()

    def _end_driving(self) -> None:
        """End the thread and wait for callers to go, as nothing can go on; nobody drives then."""
        with self._given_up:
            self._may_drive = False
            self._num_callers += 1  # so that this one is told
        self._post.ring()
        if self._thread is not None and self._timer is not None:
            self._timer.set(_BURST_S)
            self._thread.join()
            self._timer.close()
        end = time.monotonic() + _CLOSE_S
        with self._given_up:
            while self._is_driven and time.monotonic() < end:
                self._post.ring()
                self._given_up.wait(TICK_S)
            self._is_driven = True

    # -- for who has set _is_driven ---------------------------------------------------------

    def _drive(self, is_over: Callable[[], bool]) -> None:
        """Turn until it is over, or ``is_over`` raises; sleep while nothing happens."""
        progress, post = self._progress, self._post
        if progress.broken is not None:
            progress.fail_all(progress.broken)
            return
        try:
            while True:
                self._turn()
                if time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + TICK_S
                    progress.check_stalls()
                    self._turn()
                if is_over():
                    return
                self._is_asleep = True  # from here on whoever submits rings
                if not (progress.submitted or progress.to_ask):
                    post.sleep(TICK_S)
                self._is_asleep = False
        except BaseException as error:  # messages may be lost: nothing can go on
            progress.break_down(error)
            raise

    def _turn(self) -> None:
        if self._progress.turn() and self._num_callers > 1:
            with self._given_up:
                self._given_up.notify_all()

    def _pass_on(self, *, drives: bool) -> None:
        """Let another drive, if this one does or nobody; for who holds the lock."""
        if drives:
            self._is_driven = self._is_asleep = False
        if self._is_driven:
            return
        if self._num_callers:
            self._given_up.notify_all()
            return
        timer, is_seen_to = self._timer, self._is_set or not self._may_drive
        if timer is not None and not is_seen_to and self._progress.has_work():
            self._set_timer(timer)

    # -- the thread -------------------------------------------------------------------------

    def _drive_for_nobody(self) -> None:
        timer, progress, went_off = self._timer, self._progress, False
        assert timer is not None
        while self._may_drive and progress.broken is None:
            if self._is_driven or self._num_callers or not progress.is_awaited:
                went_off = timer.wait(TICK_S)
            self._is_set = False
            self._let_burst_pass()
            with self._lock:
                is_free = not (self._is_driven or self._num_callers)
                is_needed = is_free and progress.has_work()
                longest_s = max(self._burst_s, _LONGEST_S)
                self._delay_s = self._burst_s if is_needed else min(2 * self._delay_s, longest_s)
                is_early = went_off and time.monotonic() < self._next_look
                if not is_free or (is_early and not is_needed):
                    continue
                self._is_driven = True
            try:
                self._drive(self._is_unneeded)
            except Exception as error:  # those who wait are told, and whoever asks next
                if not (isinstance(error, CommError) or is_loss(error)):
                    raise
            finally:
                with self._lock:
                    self._pass_on(drives=True)

    def _let_burst_pass(self) -> None:
        """Wait while more and more is submitted: a program that submits needs Python's lock."""
        for number in range(_MOST_PAUSES):
            last = [*self._progress.submitted][-1:]
            if not last or self._is_driven or self._num_callers:
                return
            if time.monotonic() - last[0].since >= self._burst_s:
                return
            time.sleep(self._burst_s * 2**number)

    def _is_unneeded(self) -> bool:
        """Say whether the thread lets go: for good, for a caller, or for a cycle."""
        progress = self._progress
        has_work = self._may_drive and progress.is_awaited
        return bool(self._num_callers or progress.submitted or not has_work)
