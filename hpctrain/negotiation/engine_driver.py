"""Selection of the thread that drives the progress engine, a caller or a background thread."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.comm.mpi_start import is_loss
from hpctrain.core.errors import CommError, RankLostError
from hpctrain.core.libc import Timer
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.negotiation.request import Handle, Repeated

if TYPE_CHECKING:
    from torch import Tensor

    from hpctrain.negotiation.progress_engine import ProgressEngine

T = TypeVar("T")

TICK_S = 1.0  # interval of the stall checks, and of the checks for questions of other ranks
_BURST_S, _MAX_PAUSES = 100e-6, 6
"""Maximum interval between two operations of a burst, and maximum number of pauses in a burst,
each twice as long as the one before."""
_LONGEST_S = 2e-3
"""Maximum delay of the thread while every recent operation had a caller that waited for it."""
_CALL = "call"
CLOSE_S = 10.0
"""Longest wait for the other ranks when a controller closes, and for the thread that drives the
engine to stop."""


class SubmissionTimer(Timer):
    """A timer after which the background thread executes operations without a waiting caller.

    The timer is not cancelled when a caller waits, because setting the timer again takes as long
    as an operation.

    Args:
        cycle_s: time that operations without a waiting caller are delayed.
    """

    __slots__ = ("burst_s", "delay_s", "is_set")

    def __init__(self, cycle_s: float) -> None:
        super().__init__()
        self.burst_s = self.delay_s = max(cycle_s, _BURST_S)
        self.is_set = False

    def start(self) -> None:
        """Set the timer to expire after ``delay_s``."""
        self.is_set = True
        self.set(self.delay_s)

    def adapt(self, *, was_needed: bool) -> None:
        """Reset the delay if operations had no waiting caller; else double it, up to a limit."""
        longest_s = max(self.burst_s, _LONGEST_S)
        self.delay_s = self.burst_s if was_needed else min(2 * self.delay_s, longest_s)


class EngineDriver:
    """Selects the one thread that drives the ``ProgressEngine`` of a process set.

    A caller that waits drives the engine on its own thread, so no other thread has to wake up. A
    background thread drives the engine for operations without a waiting caller, and stops as soon
    as a caller waits. If only one thread may call MPI, there is no background thread.

    A signal handler may use this object, and an exception of the handler may end a call at any
    point. Therefore there is no lock: each change is one atomic operation of a container. A call
    that ends by an exception repeats its changes; a change that was already made has no effect.

    Args:
        progress: the engine; the doorbell of its mailbox wakes the driving thread.
        cycle_s: time that operations without a waiting caller are delayed.
        timeout_s: longest wait for other ranks.
    """

    def __init__(self, progress: "ProgressEngine", cycle_s: float, timeout_s: float) -> None:
        self._comm, self._progress, self._post = progress.comm, progress, progress.post
        self._timeout_s = timeout_s
        self._driving = dict[str, object]()
        """The call that drives the engine, if any, by the key ``_CALL``."""
        self._callers = dict[SimpleQueue[None], None]()
        """Queues of waiting callers; ``_wake_callers`` puts an item to wake each caller."""
        self._may_drive = True
        self._is_sleeping = False  # only valid while a thread drives
        self._next_check = time.monotonic() + TICK_S
        self._timer: SubmissionTimer | None = None
        self._thread = threading.Thread(
            target=self._drive_in_background, name="hpctrain-named", daemon=True
        )
        if self._comm.size > 1 and calls_from_threads():
            self._timer = SubmissionTimer(cycle_s)
            self._thread.start()

    def reduce_now(self, repeated: Repeated, tensor: "Tensor") -> bool:
        """Execute a repeated reduction; return False if other operations are in flight."""
        if self._callers:
            return False
        done = self._drive_once(self._progress.reduce_now, self, repeated, tensor)
        if isinstance(done, Handle):  # another rank is late
            done.wait()
            return True
        return done is True

    @dynamo_disable
    def finish(self, handle: Handle, timeout_s: float | None = None) -> None:
        """Wait until an operation is complete; drive the engine unless another thread drives it.

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
        except BaseException as error:
            if not handle.is_done:
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Fail all operations of this rank: a caller that got ``error`` may change the tensors."""
        self._progress.refuse(error)
        if self._drive_once(self._drive, lambda: True) is None and self._is_sleeping:
            self._post.ring()  # the call that drives fails the operations

    def _await(self, handle: Handle, limit_s: float) -> None:
        since = time.monotonic()

        def is_over() -> bool:
            if not handle.is_done and (waited_s := time.monotonic() - since) > limit_s:
                rank = self._progress.world_rank
                raise RankLostError(
                    f"all ranks must submit {handle.name} within HPCTRAIN_TIMEOUT={limit_s:g} "
                    f"seconds, but rank {rank} has waited {waited_s:.0f} s for the others; see "
                    f"the report of missing ranks, or increase HPCTRAIN_TIMEOUT"
                )
            return handle.is_done

        caller: SimpleQueue[None] = SimpleQueue()
        try:
            self._callers[caller] = None
            while not is_over() and not self._drive_once(self._drive, is_over):
                self._post.ring()
                with suppress(Empty):
                    caller.get(timeout=TICK_S)
            self._remove(caller)
        except BaseException:
            self._remove(caller)
            raise

    def _remove(self, caller: "SimpleQueue[None]") -> None:
        self._callers.pop(caller, None)
        self._pass_on(None)

    def look(self) -> None:
        """Execute operations without waiting, if there is no background thread."""
        if self._timer is None:
            self._drive_once(self._drive, lambda: True)

    def nudge(self) -> None:
        """Ensure that some thread executes a submitted operation, without waiting."""
        if self._driving:
            if self._is_sleeping:
                self._post.ring()
        elif self._timer is None:
            self.look()
        elif not self._timer.is_set:
            self._timer.start()

    def _start(self, handle: Handle) -> None:
        """Start an operation on the fast path, if possible and no other operation is in flight."""
        if self._progress.fast_path is not None and not self._callers:
            self._drive_once(self._progress.start, handle)

    def _drive_once(self, act: Callable[..., T], *arguments: Any) -> T | None:
        """Call ``act`` while no other call drives the engine; return None if another call does."""
        call = object()
        try:
            if self._driving.setdefault(_CALL, call) is not call:
                return None
            result = act(*arguments)
            self._pass_on(call)
        except BaseException as error:  # the other ranks may have committed the operation
            if self._driving.get(_CALL) is call:
                self._progress.break_down(error)
            self._pass_on(call)
            raise
        return result

    def end(self) -> None:
        """Fail pending operations, and stop driving the engine. Waits for the driving thread."""
        self._progress.shut_down()
        self._may_drive = False
        caller: SimpleQueue[None] = SimpleQueue()
        self._callers[caller] = None
        self._post.ring()
        if self._timer is not None:
            self._timer.set(_BURST_S)
            self._thread.join()
            self._timer.close()
        end = time.monotonic() + CLOSE_S
        # The entry remains, so that no later call drives.
        while self._driving.setdefault(_CALL, self) is not self and time.monotonic() < end:
            self._post.ring()
            with suppress(Empty):
                caller.get(timeout=TICK_S)

    # -- called by the thread that drives ---------------------------------------------------

    def _drive(self, is_over: Callable[[], bool]) -> bool:
        """Run the engine until ``is_over`` returns True; sleep while the engine has no work.

        Returns True.
        """
        progress, post = self._progress, self._post
        while True:
            if progress.broken is not None:
                progress.fail_all(progress.broken)
                return True
            if progress.advance() and len(self._callers) > 1:
                self._wake_callers()
            if time.monotonic() >= self._next_check:
                self._next_check = time.monotonic() + TICK_S
                progress.check_stalls()
                continue
            if is_over():
                return True
            self._is_sleeping = True  # from here on ``submit`` rings the doorbell
            if not (progress.queue.submitted or progress.questions or progress.broken):
                post.sleep(TICK_S)
            self._is_sleeping = False

    def _pass_on(self, call: object) -> None:
        """If ``call`` drives the engine, stop; then wake a caller or the background thread."""
        if call is not None and self._driving.get(_CALL) is call:
            del self._driving[_CALL]
        if self._driving:
            return
        if self._callers:
            self._wake_callers()
            return
        timer = self._timer
        if timer is None or timer.is_set or not self._may_drive:
            return
        if self._progress.has_work():
            timer.start()

    def _wake_callers(self) -> None:
        for caller in list(self._callers):
            caller.put(None)

    # -- the thread -------------------------------------------------------------------------

    def _drive_in_background(self) -> None:
        timer, progress, went_off = self._timer, self._progress, False
        assert timer is not None
        while self._may_drive and progress.broken is None:
            if self._driving or self._callers or not progress.queue.is_awaited:
                went_off = timer.wait(TICK_S)
            timer.is_set = False
            self._wait_for_burst(timer.burst_s)
            is_free = not (self._driving or self._callers)
            is_needed = is_free and progress.has_work()
            timer.adapt(was_needed=is_needed)
            is_early = went_off and time.monotonic() < self._next_check
            if not is_free or (is_early and not is_needed):
                continue
            try:
                self._drive_once(self._drive, self._is_unneeded)
            except Exception as error:  # waiting and later callers get the error
                if not (isinstance(error, CommError) or is_loss(error)):
                    raise

    def _wait_for_burst(self, pause_s: float) -> None:
        """Wait until the burst of submissions ends, since the program needs the GIL to submit."""
        for number in range(_MAX_PAUSES):
            last = [*self._progress.queue.submitted][-1:]
            if not last or self._driving or self._callers:
                return
            if time.monotonic() - last[0].since >= pause_s:
                return
            time.sleep(pause_s * 2**number)

    def _is_unneeded(self) -> bool:
        """Return True if the thread must stop driving: for a caller, a burst, or lack of work."""
        progress = self._progress
        has_work = self._may_drive and progress.queue.is_awaited
        return bool(self._callers or progress.queue.submitted or not has_work)
