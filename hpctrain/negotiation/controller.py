"""Controller of one process set: executes named operations in the same order on all ranks.

A caller that waits for an operation drives the progress engine; otherwise a background thread
does.
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

TICK_S = 1.0  # interval of the stall checks, and of the checks for questions of other ranks
_BURST_S, _MOST_PAUSES = 100e-6, 6
"""Maximum interval between two operations of a burst, and maximum number of pauses in a burst,
each twice as long as the one before."""
_LONGEST_S = 2e-3
"""Maximum delay of the thread while every recent operation had a caller that waited for it."""
_CLOSE_S = 10.0
"""Longest wait in ``close`` for ranks whose operations have failed, and for a caller whose
operation does not return."""


class Controller:
    """Accept requests from any thread and execute each once all ranks have submitted it.

    One thread at a time drives the ``ProgressEngine``. A caller that waits drives the engine on
    its own thread, so no other thread has to wake up. The controller's thread drives the engine
    for operations without a waiting caller, and stops as soon as a caller waits.

    The constructor is collective over ``comm``: it creates mailboxes.

    Args:
        comm: used by this controller only; ``close`` closes it.
        timelines: timelines of this rank.
        stalls: detects operations that some rank does not submit.
        fusion_bytes: maximum size of a fused message.
        cycle_s: time that operations without a waiting caller are delayed, so that later
            operations can share their message.
        timeout_s: longest wait for other ranks.
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
        self.comm = comm
        self._post, self._stalls = comm.new_mailbox(), stalls
        self._progress = ProgressEngine(
            comm, self._post, fusion_bytes=fusion_bytes, timelines=timelines, stalls=stalls
        )
        self._timeout_s = timeout_s
        self._is_open = self._may_drive = True
        self._refusal: HorovodInternalError | None = None
        """Error of new operations on this rank; other ranks may not have it yet."""
        self._repeated: dict[str, Repeated] = {}
        self._owner = Owner()
        self._lock = threading.Lock()
        self._given_up = threading.Condition(self._lock)
        """Notified when the driver stops and when an operation is complete."""
        self._is_driven = self._is_asleep = False
        self._num_callers = 0
        self._next_look = time.monotonic() + TICK_S
        self._burst_s = self._delay_s = max(cycle_s, _BURST_S)
        self._timer: Timer | None = None
        """Expires when operations without a waiting caller have waited for ``_delay_s``. The timer
        is not cancelled when a caller waits: setting it takes as long as an operation."""
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
        """Start an operation and return its handle. Not collective.

        Args:
            request: the operation.
            take: converts the result to the return value of ``wait``.
            is_awaited: True if the caller waits for the handle at once; the operation starts
                then.

        Raises:
            DuplicateNameError: an operation of this name is in flight on this rank.
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
        """Start a reduction that was passed to ``repeat`` before; None if no such one fits.

        ``name`` is the name passed to ``repeat``; see ``submit`` for the rest.
        """
        repeated = self._repeated.get(name)
        if repeated is None or not repeated.fits(tensor, op, prescale, postscale):
            return None
        handle = TensorHandle(self, repeated, tensor)
        self._enter(handle, is_awaited=is_awaited)
        return handle

    def repeat(self, name: str, request: Request) -> None:
        """Store the signature of an in-place reduction of one tensor, for ``submit_tensor``."""
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
        """Contribute neutral values to all operations until all ranks have joined.

        The result is the rank that joined last. If MPI supports calls from several threads, the
        controller's thread executes the operations without a waiting caller.
        """
        handle = Handle(self, Request(Kind.BARRIER, None, ()), JOIN)
        self._enter(handle)
        return handle

    def break_off(self, reason: str) -> None:
        """Fail all pending and all future operations on every rank. Not collective.

        A new controller can use the same communicator, see ``abandon``.
        """
        self._refusal = HorovodInternalError(reason)
        self._progress.to_ask.append(BreakOff(reason))
        self._nudge()

    def refuse(self, reason: str) -> None:
        """Reject new operations on this rank; an empty ``reason`` accepts them again. Local."""
        self._refusal = HorovodInternalError(reason) if reason else None

    @property
    def is_broken(self) -> bool:
        """Whether the operations of this rank have failed; other ranks may not know."""
        return self._progress.broken is not None

    def give_up(self) -> None:
        """Shut down without a final operation. Collective."""
        self._progress.shut_down()

    def close(self) -> None:
        """Close; operations that only some ranks have submitted fail. Collective; never raises."""
        if self._owner.is_here:  # a forked child must not close
            self.abandon()
            self.comm.close()

    def abandon(self) -> None:
        """Close, but keep the communicator open for another controller. Collective."""
        if not self._is_open:
            return
        self._is_open = False
        self._refusal = self._refusal or HorovodInternalError(
            "a named operation must use an open process set, but this one was shut down; call "
            "hpctrain.init() or add_process_set() again"
        )
        # The other ranks execute operations that are decided, and would wait for this rank.
        last = self._progress.closing = Handle(self, Request(Kind.BARRIER, None, ()), CLOSE)
        self._enter(last, is_awaited=True)
        with suppress(CommError):
            self.finish(last, _CLOSE_S)
        self._progress.shut_down()
        self._end_driving()
        self._post.close()

    @dynamo_disable
    def finish(self, handle: Handle, timeout_s: float | None = None) -> None:
        """Wait for an operation; drive the engine, unless another thread does.

        Args:
            handle: the operation.
            timeout_s: longest wait; by default ``timeout_s`` of the constructor.

        Raises:
            RankLostError: the operation is not complete after ``timeout_s``.
        """
        try:
            self._start(handle)
            if not handle.is_done:
                self._await(handle, self._timeout_s if timeout_s is None else timeout_s)
        except BaseException:
            if not handle.is_done:  # the caller may change its tensors
                self.comm.fail()
            raise

    def _await(self, handle: Handle, limit_s: float) -> None:
        since = time.monotonic()

        def is_over() -> bool:
            if not handle.is_done and (waited_s := time.monotonic() - since) > limit_s:
                raise RankLostError(
                    f"all ranks must submit {handle.name} within HPCTRAIN_TIMEOUT={limit_s:g} "
                    f"seconds, but rank {self.comm.rank} has waited {waited_s:.0f} s for the "
                    f"others; see the report of missing ranks, or increase HPCTRAIN_TIMEOUT"
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
        """Make progress without waiting, if there is no background thread."""
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
        """Fail the communicator after an interrupt, because the caller may change its tensors."""
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
            if progress.broken is not None:  # another thread has failed meanwhile
                progress.fail_all(progress.broken)
            if not is_awaited:
                self._nudge()
        except BaseException as error:
            self._fail_after(error)
            raise

    def _nudge(self) -> None:
        """Make sure that a submitted operation is executed, without waiting for it."""
        if self._is_driven:
            if self._is_asleep:
                self._post.ring()
        elif self._timer is None:
            self.look()
        elif not self._is_set:
            with self._lock:
                self._set_timer(self._timer)

    def _set_timer(self, timer: Timer) -> None:
        """Wake the thread after ``_delay_s``."""
        self._is_set = True
        timer.set(self._delay_s)

    def _start(self, handle: Handle) -> None:
        """Start a repeated operation on the fast path, if no other operation is in flight."""
        progress = self._progress
        if progress.fast_path is None:
            return
        with self._lock:
            if self._is_driven or self._num_callers:
                return
            self._is_driven = True
        try:
            progress.start(handle)
        except BaseException as error:  # the other ranks may have committed the operation
            progress.break_down(error)
            raise
        finally:
            with self._lock:
                self._pass_on(drives=True)

    def drop(self) -> None:
        """Close without the other ranks, which may be lost. Not collective."""
        self._is_open = False
        self._refusal = self._refusal or HorovodInternalError(
            "a named operation needs all ranks of its process set, but some are lost"
        )
        self._progress.shut_down()
        self._end_driving()

    def _end_driving(self) -> None:
        """End the thread, wait for callers to return, and let no other thread drive afterwards."""
        with self._given_up:
            self._may_drive = False
            self._num_callers += 1  # the driver notifies only if there are callers
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

    # -- called by the thread that has set _is_driven ---------------------------------------

    def _drive(self, is_over: Callable[[], bool]) -> None:
        """Run the engine until ``is_over`` is True or raises; sleep while there is no work."""
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
                self._is_asleep = True  # from here on ``submit`` rings the doorbell
                if not (progress.submitted or progress.to_ask):
                    post.sleep(TICK_S)
                self._is_asleep = False
        except BaseException as error:  # messages may be lost, so no later operation is safe
            progress.break_down(error)
            raise

    def _turn(self) -> None:
        if self._progress.turn() and self._num_callers > 1:
            with self._given_up:
                self._given_up.notify_all()

    def _pass_on(self, *, drives: bool) -> None:
        """Wake the next driver, unless another thread drives. The caller holds the lock."""
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
            except Exception as error:  # waiting and later callers get it from the engine
                if not (isinstance(error, CommError) or is_loss(error)):
                    raise
            finally:
                with self._lock:
                    self._pass_on(drives=True)

    def _let_burst_pass(self) -> None:
        """Wait until the burst of submissions ends: the program needs the GIL to submit."""
        for number in range(_MOST_PAUSES):
            last = [*self._progress.submitted][-1:]
            if not last or self._is_driven or self._num_callers:
                return
            if time.monotonic() - last[0].since >= self._burst_s:
                return
            time.sleep(self._burst_s * 2**number)

    def _is_unneeded(self) -> bool:
        """Return True if the thread must stop driving: for a caller, a burst, or at the end."""
        progress = self._progress
        has_work = self._may_drive and progress.is_awaited
        return bool(self._num_callers or progress.submitted or not has_work)
