"""Requests to stop a run: signals, a time limit or a file.

This module records the requests; the training loop reads them between steps.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hpctrain.cluster.env import STOPPED, STOPPING, asked_by, run_directory
from hpctrain.comm.agreement import is_any, raise_if_any
from hpctrain.core.errors import CommError, LaunchError
from hpctrain.core.logs import logger
from hpctrain.core.python_compat import Self
from hpctrain.core.units import format_seconds
from hpctrain.launch.slurm.scheduler import job_end

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
SENT_TO_ALL = (signal.SIGUSR1, signal.SIGHUP)
"""Signals that a terminal or Slurm also sends to the forked children of a rank."""

ECHO_S = 1.0  # a launcher and Slurm may both send a signal for one request
LOOK_S = 1.0  # interval of the checks whether the stop file exists
MARGIN_S = 60.0  # default time to save before a job ends

_END = b"\0"  # the watcher thread, which reads signal numbers from a pipe, ends at this byte


def deadline(
    started: float, after_s: float | None, job_end: float | None, margin_s: float
) -> float | None:
    """Return the time at which a run must stop, in seconds since 1970; None for never.

    Args:
        started: start of the run, in seconds since 1970.
        after_s: time limit of the run in seconds, or None.
        job_end: end of the batch job, in seconds since 1970, or None.
        margin_s: time to save before ``job_end``; at most a tenth of the time from ``started`` to
            ``job_end``.
    """
    ends = []
    if after_s is not None:
        ends.append(started + after_s)
    if job_end is not None:
        ends.append(job_end - min(margin_s, max(0.0, 0.1 * (job_end - started))))
    return min(ends, default=None)


def end_of_job() -> float | None:
    """Return the end of the batch job in seconds since 1970; None if unknown or without a job."""
    try:
        return job_end()
    except LaunchError as error:
        logger.warning(
            f"the run cannot stop by itself before its job ends: {error}; set stop.after in the "
            f"configuration, or HPCTRAIN_BUDGET"
        )
    return None


@contextmanager
def held_back() -> Iterator[None]:
    """Block the signal SIGUSR1 until ``StopRequests`` is entered inside this context.

    SIGUSR1 would end a program that has not installed a handler for the signal. Enter this context
    before the program starts threads, since a thread that does not block SIGUSR1 receives it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_entered: "list[StopRequests]" = []  # entered contexts, in order


def _leave_signals_to_parent() -> None:
    """In a forked child, restore the previous handlers; only the parent handles stop requests."""
    while _entered:
        _entered.pop().leave_to_parent()


os.register_at_fork(after_in_child=_leave_signals_to_parent)


class StopRequests:
    """Records requests to stop; the training loop reads ``reason`` between steps.

    While this context is entered, the first signal of ``SIGNALS`` sets a flag and calls the
    previous handler of the program, if any. A second signal, more than one second later, ends the
    process at once with exit code 128 plus the signal number, even if the process hangs in native
    code. Signals within one second count as one, since a launcher and Slurm may both send a signal
    for the same request. Ignored signals remain ignored. Only the main thread can handle signals:
    if another thread enters this context, the context checks only the file and the deadline.

    When ``hpctrain launch`` receives SIGINT, SIGTERM or SIGHUP, it sends SIGUSR1 to the ranks; the
    ranks on the host of the launcher report the signal that the launcher received. Forked
    children, such as workers of a ``DataLoader``, use the previous handlers. SIGUSR1 and SIGHUP do
    not end the children, because the rank needs its children until it has saved.

    Args:
        stop_file: file whose existence requests a stop.
        deadline: time to stop, in seconds since 1970.
        look_s: minimum interval of the checks for the file, in seconds.
        clock: function that returns the current time, in seconds since 1970.
    """

    def __init__(
        self,
        *,
        stop_file: Path | None = None,
        deadline: float | None = None,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._stop_file, self._deadline = stop_file, deadline
        self._look_s, self._clock = look_s, clock
        self._checked_at = float("-inf")
        self._reason = ""
        self._before: dict[int, object] = {}
        self._read, self._write, self._fd_before = -1, -1, -1
        self._watcher: threading.Thread | None = None

    @property
    def reason(self) -> str:
        """Reason to stop, such as ``SIGTERM`` or ``budget``; empty without a request."""
        if not self._reason:
            self._reason = self._find_reason()
        return self._reason

    def _find_reason(self) -> str:
        now = self._clock()
        if self._deadline is not None and now >= self._deadline:
            return "budget"
        if self._stop_file is not None and now - self._checked_at >= self._look_s:
            self._checked_at = now
            if self._stop_file.exists():
                return f"file {self._stop_file.name}"
        return ""

    def describe(self) -> str:
        """Return the time until the deadline as text, such as ``in 2.5 h``."""
        if self._deadline is None:
            return "no limit"
        return f"in {format_seconds(max(0.0, self._deadline - self._clock()))}"

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        if threading.current_thread() is threading.main_thread():
            taken = [n for n in SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)]
            self._start_watcher()
            self._before = {number: signal.getsignal(number) for number in taken}
            for number in taken:
                signal.signal(number, self._on_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
            _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers.

        Only the main thread can do this. In another thread, the handlers remain installed, and a
        second signal still ends the process.
        """
        if self in _entered and threading.current_thread() is threading.main_thread():
            _entered.remove(self)
            self._install_before()
            os.write(self._write, _END)
            assert self._watcher is not None
            self._watcher.join()
            self._close_pipe()

    def leave_to_parent(self) -> None:
        """Restore the previous handlers in a forked child, which has no watcher thread."""
        for number in SENT_TO_ALL:
            if self._before.get(number) is signal.SIG_DFL:
                self._before[number] = signal.SIG_IGN
        self._install_before()
        self._close_pipe()

    def _install_before(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # from getsignal()
        self._before = {}
        signal.set_wakeup_fd(self._fd_before)

    def _close_pipe(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        asked = asked_by() if number == signal.SIGUSR1 else ""
        self._reason = self._reason or asked or signal.Signals(number).name
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    # Python runs handlers only between bytecode instructions, so a second signal could not end a
    # process that hangs in native code. The C handler of Python writes the number of each signal
    # to a file descriptor at once, and a watcher thread reads the number.

    def _start_watcher(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="second signal")
        self._watcher.start()

    def _watch(self) -> None:
        first_at = None
        while (numbers := os.read(self._read, 1)) != _END:
            now = time.monotonic()
            if numbers[0] not in SIGNALS:
                continue
            if first_at is None:
                first_at = now
            elif now - first_at > ECHO_S:
                os._exit(128 + numbers[0])


_NOT_IN_MAIN = (
    "stop signals can only be received by the main thread, but the first should_stop() was called "
    "in thread {}; call should_stop() once in the main thread of every rank before the thread "
    "starts"
)


class CommonStop:
    """Makes the ranks of a world agree to stop.

    The first call of ``is_asked`` starts to observe the signals, the stop file and the deadline.

    Args:
        comm: communicator of all ranks.
        budget_s: time limit in seconds, from the creation of this object; None for no limit.
    """

    def __init__(self, comm: "Communicator", budget_s: float | None) -> None:
        self._comm, self._budget_s = comm, budget_s
        self._started = time.time()
        self._requests: StopRequests | None = None
        self._is_over = False

    def is_asked(self) -> bool:
        """Return True if any rank has a request to stop. Collective: one small all-reduce."""
        fault = ""
        if self._requests is None:
            if threading.current_thread() is threading.main_thread():
                self._requests = self._new_requests().__enter__()
            else:
                fault = _NOT_IN_MAIN.format(threading.current_thread().name)
        if not self._is_over:
            reason = "" if self._requests is None else self._requests.reason
            if is_any(self._comm, mine=bool(reason or fault)):
                reasons, faults = zip(*self._comm.allgather_object((reason, fault)), strict=True)
                raise_if_any([text or None for text in faults], CommError)
                self._is_over = True
                if self._comm.rank == 0:
                    self._log_stop(", ".join(sorted({*reasons} - {""})))
        return self._is_over

    def close(self) -> None:
        """Restore the previous signal handlers."""
        if self._requests is not None:
            self._requests.__exit__()
            self._requests = None

    def _new_requests(self) -> StopRequests:
        if self._comm.rank:
            return StopRequests()
        folder = run_directory()
        end = deadline(self._started, self._budget_s, end_of_job(), MARGIN_S)
        return StopRequests(stop_file=folder and folder / "STOP", deadline=end)

    @staticmethod
    def _log_stop(reason: str) -> None:
        logger.warning(f"asked to stop by {reason}: the ranks save, and end with code {STOPPED}")
        if folder := run_directory():
            with suppress(OSError):
                (folder / STOPPING).touch()
