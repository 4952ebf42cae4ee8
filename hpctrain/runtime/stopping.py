"""Requests to stop a run: signals, a time limit, a file. They are recorded, nothing more."""

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
from hpctrain.comm.agreement import raise_if_any
from hpctrain.core.errors import CommError, LaunchError
from hpctrain.core.logs import logger
from hpctrain.core.python_compat import Self
from hpctrain.core.units import format_seconds
from hpctrain.launch.slurm.scheduler import job_end

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

ECHO_S = 1.0  # a launcher and a batch system may both deliver the same request: that is one signal
LOOK_S = 1.0  # between two looks at the file
MARGIN_S = 60.0  # time to save in, before a job ends, for loops that do not say theirs

_END = b"\0"  # ends the thread that reads numbers of signals


def deadline(
    started: float, after_s: float | None, job_end: float | None, margin_s: float
) -> float | None:
    """Return when to stop a run of ``after_s`` seconds, in seconds since 1970; None for never.

    ``job_end`` is when the batch system ends the job; of the ``margin_s`` to save before that, at
    most a tenth of what the job has left counts.
    """
    ends = []
    if after_s is not None:
        ends.append(started + after_s)
    if job_end is not None:
        ends.append(job_end - min(margin_s, max(0.0, 0.1 * (job_end - started))))
    return min(ends, default=None)


@contextmanager
def held_back() -> Iterator[None]:
    """Keep a SIGUSR1 that comes in the block until ``StopRequests`` is entered there.

    Before a program has its handlers, while it still imports, the signal would end it. Enter it
    before there are other threads: one that does not block the signal gets it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_entered: "list[StopRequests]" = []  # those that handle the signals of this process, in order


def _leave_signals_to_parent() -> None:
    """Let a forked child handle signals as its parent did before: it is ended by them."""
    while _entered:
        _entered.pop().leave_to_parent()


os.register_at_fork(after_in_child=_leave_signals_to_parent)


class StopRequests:
    """Records requests to stop; the training loop reads ``reason`` between steps.

    While it is entered, the first SIGTERM, SIGUSR1 or SIGINT sets a flag, and calls the handler
    that the program had installed for it, if any. A second one, more than a second later, ends the
    process at once with 128 plus its number, also while it is stuck in native code. A launcher or
    Slurm may send the same request twice: what follows within the second counts as one. ``hpctrain
    launch`` sends SIGUSR1 for SIGINT, SIGTERM and SIGHUP, and the ranks on its host find out which
    of them it got. Signals that were ignored before stay ignored, and forked children handle
    signals as the program did before. Only the main thread can take signals: entered in another
    thread, this looks at the file and the deadline alone.
    """

    def __init__(
        self,
        *,
        stop_file: Path | None = None,
        deadline: float | None = None,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Look at a file, every ``look_s`` seconds at most, and at a deadline by ``clock``.

        Whoever makes ``stop_file`` asks for a stop; the deadline is in seconds since 1970.
        """
        self._stop_file, self._deadline = stop_file, deadline
        self._look_s, self._clock = look_s, clock
        self._looked_at = float("-inf")
        self._reason = ""
        self._before: dict[int, object] = {}
        self._read, self._write, self._fd_before = -1, -1, -1
        self._watcher: threading.Thread | None = None

    @property
    def reason(self) -> str:
        """Why this process should stop: ``SIGTERM``, ``budget``, ...; empty while it need not."""
        if not self._reason:
            self._reason = self._look()
        return self._reason

    def _look(self) -> str:
        now = self._clock()
        if self._deadline is not None and now >= self._deadline:
            return "budget"
        if self._stop_file is not None and now - self._looked_at >= self._look_s:
            self._looked_at = now
            if self._stop_file.exists():
                return f"file {self._stop_file.name}"
        return ""

    def describe(self) -> str:
        """Say when the time is over, for people."""
        if self._deadline is None:
            return "no limit"
        return f"in {format_seconds(max(0.0, self._deadline - self._clock()))}"

    def __enter__(self) -> Self:
        """Handle the signals from now on."""
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
        """Install the handlers that were there before.

        In another thread than the main one that is not possible: they stay, and a second signal
        ends the process.
        """
        if self in _entered and threading.current_thread() is threading.main_thread():
            _entered.remove(self)
            self._install_before()
            os.write(self._write, _END)
            assert self._watcher is not None
            self._watcher.join()
            self._close_pipe()

    def leave_to_parent(self) -> None:
        """In a forked child, which has no watcher: do what ``__exit__`` does."""
        self._install_before()
        self._close_pipe()

    def _install_before(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what getsignal() returned
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

    # Python runs a handler only between two of its instructions, so a second signal could not
    # end a process that hangs in native code. The C part of Python's handlers also writes the
    # number of each signal to a descriptor, at once; a sleeping thread reads it there.

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
    "stop signals can only be taken by the main thread, but the first should_stop() was called in "
    "thread {}; call should_stop() once in the main thread of every rank before the thread starts"
)


class CommonStop:
    """The agreement of the ranks of a world on whether they stop."""

    def __init__(self, comm: "Communicator", budget_s: float | None) -> None:
        """Look at nothing before the first question."""
        self._comm, self._budget_s = comm, budget_s
        self._started = time.time()
        self._requests: StopRequests | None = None
        self._is_over = False

    def is_asked(self) -> bool:
        """Ask all ranks. Collective; one small all-reduce while no rank was asked."""
        fault = ""
        if self._requests is None:
            if threading.current_thread() is threading.main_thread():
                self._requests = self._look().__enter__()
            else:
                fault = _NOT_IN_MAIN.format(threading.current_thread().name)
        if not self._is_over:
            reason = "" if self._requests is None else self._requests.reason
            if self._is_any(is_mine=bool(reason or fault)):
                reasons, faults = zip(*self._comm.allgather_object((reason, fault)), strict=True)
                raise_if_any([text or None for text in faults], CommError)
                self._is_over = True
                if self._comm.rank == 0:
                    self._tell(", ".join(sorted({*reasons} - {""})))
        return self._is_over

    def _is_any(self, *, is_mine: bool) -> bool:
        import torch  # noqa: PLC0415 - not for a launcher, or before ``held_back``

        from hpctrain.comm.ops import Op  # noqa: PLC0415 - it needs torch

        flag = torch.tensor(int(is_mine), dtype=torch.int32)
        self._comm.allreduce_(flag, op=Op.MAX).wait()
        return bool(flag.item())

    def close(self) -> None:
        """Give the signals back."""
        if self._requests is not None:
            self._requests.__exit__()
            self._requests = None

    def _look(self) -> StopRequests:
        if self._comm.rank:
            return StopRequests()
        folder, ends = run_directory(), None
        try:
            ends = job_end()
        except LaunchError as error:
            logger.warning(f"ranks cannot stop by themselves before the job ends: {error}")
        end = deadline(self._started, self._budget_s, ends, MARGIN_S)
        return StopRequests(stop_file=folder and folder / "STOP", deadline=end)

    @staticmethod
    def _tell(reason: str) -> None:
        logger.warning(f"asked to stop by {reason}: the ranks save, and end with code {STOPPED}")
        if folder := run_directory():
            with suppress(OSError):
                (folder / STOPPING).touch()
