"""Run ``mpirun`` to its end: forward signals, and bound the time of every exit path."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import IO, NamedTuple

from hpctrain.cluster.env import ASKED, BEGUN, ENDED, ENDING, RANK_LOST, STOPPED
from hpctrain.cluster.start_watch import FAILED
from hpctrain.core.config import Settings
from hpctrain.core.errors import LaunchError
from hpctrain.launch import rank_processes
from hpctrain.launch.program import handling, start
from hpctrain.launch.stderr import GONE, KILLED, LOST, fold, write_line

FOLDER = "PRTE_MCA_prte_local_tmpdir_base"
"""Variable with the folder for session files of mpirun; only Open MPI 5 reads the variable."""

GRACE_S = 5.0  # time between a signal and SIGTERM, and between SIGTERM and SIGKILL

SAVE_S = 60.0
"""Time for ranks to save their state after a request, before the next signal."""

LOOK_S, ORPHANED_S = 1.0, 5.0
"""Time between checks of mpirun's children, and until mpirun without children is killed."""

FEW_S = 3.0  # time limit for ranks that wait in MPI_Init for a rank that has ended

TIMED_OUT = 124  # exit code of a launch that exceeded its time limit, as of ``timeout``

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGTSTP)


class LaunchEnd(NamedTuple):
    """Result of a launch."""

    code: int  # exit code
    is_wanted: bool  # whether a signal to this process, or the time limit, ended the launch


def supervise(
    line: Sequence[str],
    *,
    environ: Mapping[str, str] = os.environ,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
    save_s: float = SAVE_S,
) -> LaunchEnd:
    """Run a command line of ``mpiexec.command`` to its end.

    If this process receives SIGINT, SIGTERM or SIGHUP, the function sends the signal to the
    process group of mpirun. Processes that remain get SIGTERM after ``grace_s`` seconds, and
    SIGKILL after ``grace_s`` more seconds. A second signal kills at once. If all ranks handle
    requests to stop, they get SIGUSR1 first, and the other signals start ``save_s`` seconds later,
    because Open MPI's mpirun kills the ranks when it ends. SIGUSR1 is sent to mpirun only, which
    forwards the signal to the ranks. If SIGKILL ends this process, mpirun gets SIGTERM and ends
    the ranks.

    The exit code is that of mpirun, except in these cases:

    - 124: the launch exceeded ``timeout_s``.
    - 128 plus the number of a signal, as in a shell: the signal ended a rank; or this process
      received the signal, and the ranks neither stopped on request nor exited with 0 or 85.
    - 87: the launch lost a rank. SIGKILL ended the rank, the rank exited without an error between
      ``MPI_Init`` and ``MPI_Finalize``, its node is lost, other ranks wait for an ended rank in
      ``MPI_Init``, or ranks wait longer than ``HPCTRAIN_TIMEOUT`` in ``MPI_Init`` or
      ``MPI_Finalize``. The code is also 87 if mpirun returned 0, but some ranks reported only
      their start and not their end, see ``WATCHED``.
    - With recovery, if a rank ends all ranks: the code that this rank reports, see ``ENDING``.

    Args:
        line: the command line.
        environ: environment variables of mpirun.
        timeout_s: time limit of the launch; None for no limit.
        grace_s: time between two signals.
        save_s: time for ranks to save their state.

    Raises:
        LaunchError: the program cannot be started.
        KeyboardInterrupt: SIGINT has ended the launch; raised when mpirun has ended.
    """
    with session(environ) as own, _ended_with_this() as announce:
        process = _started(line, own, announce)
        counts = Counter[str]()
        ending = _Ending(process, own.get(ASKED), counts, grace_s=grace_s, save_s=save_s)
        reader = threading.Thread(target=fold, args=(process, counts), daemon=True, name="stderr")
        reader.start()
        if timeout_s:
            ending.after(timeout_s, ending.on_timeout)
        try:
            with handling(SIGNALS, ending.on_signal):
                code = ending.wait()
        finally:
            ending.kill()
            ending.close()
            reader.join(LOOK_S)  # a process that outlives its rank may hold the pipe open
    if ending.timed_out:
        return LaunchEnd(TIMED_OUT, is_wanted=True)
    if ending.first_signal is not None and code not in (0, STOPPED) and not ending.is_granted:
        write_line(f"the launch was ended by {signal.Signals(ending.first_signal).name}")
        if ending.first_signal == signal.SIGINT:
            raise KeyboardInterrupt
        return LaunchEnd(128 + ending.first_signal, is_wanted=True)
    code = _meant(code, counts)
    return LaunchEnd(code if code >= 0 else 128 - code, is_wanted=ending.first_signal is not None)


def _meant(code: int, counts: Counter[str]) -> int:
    """Convert the exit code of mpirun to the exit code of the launch; see ``supervise``."""
    if code == counts[KILLED] != 0:
        code += 128  # as in Open MPI and shells
    if counts[ENDING] and code not in (0, STOPPED):
        return counts[ENDING]
    # mpirun hung after the loss of a node, and was killed
    has_hung = counts[LOST] and code == -signal.SIGKILL
    has_left = code == 1 and counts[GONE]  # Open MPI returns 1 instead of 0
    if counts[FAILED] or has_hung or has_left or code == 128 + signal.SIGKILL:
        return RANK_LOST  # the exit code of ranks that detect the loss themselves
    if code == 0 and (counts[LOST] or counts[BEGUN] > counts[ENDED]):
        why = "a node is lost" if counts[LOST] else "the ranks have not completed"
        write_line(f"{why}: the run has failed")
        return RANK_LOST
    return code


@contextlib.contextmanager
def session(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield an environment in which mpirun stores its session files in a new temporary folder.

    By default, Open MPI 5 names the session folder after the process id of mpirun. A killed mpirun
    leaves the folder behind, and a later mpirun with the same id fails with exit code 213. A
    folder that ``environ`` names is used instead and is not removed.

    The temporary folder also contains the file with the reason of a stop request.
    """
    try:
        folder = TemporaryDirectory(prefix="hpctrain-mpirun-", ignore_cleanup_errors=True)
    except OSError:  # mpirun cannot create a folder either, and reports the error
        yield dict(environ)
        return
    with folder as name:
        yield {FOLDER: name} | dict(environ) | {ASKED: f"{name}/asked"}


def _started(
    line: Sequence[str], environ: Mapping[str, str], announce: Callable[[], object]
) -> subprocess.Popen[bytes]:
    """Start mpirun, call ``announce`` in its process, and forward the input of the terminal."""
    terminal = sys.__stdin__ is not None and sys.__stdin__.isatty()
    try:
        # A file or pipe belongs to the calling script, so mpirun must not read it. In a separate
        # session, mpirun gets no Ctrl-C of the terminal: it would kill ranks that could save.
        stdin = subprocess.PIPE if terminal else subprocess.DEVNULL
        process = start(
            line, env=environ, stdin=stdin, stderr=subprocess.PIPE, preexec_fn=announce
        )
    except OSError as error:
        raise LaunchError(
            f"{line[0]} must be a program that starts, but failed: {error}"
        ) from None
    if process.stdin is not None:
        forward_input(process.stdin)
    return process


@contextlib.contextmanager
def _ended_with_this() -> Iterator[Callable[[], object]]:
    """Send SIGTERM to mpirun if this process ends inside the block.

    The context manager yields a function that the process of mpirun must call before it runs
    mpirun. The function sends the process id to a shell that was started before; the shell waits
    until its input ends with this process, and then sends the signal. This process cannot send
    the process id: SIGKILL could end this process between the start of mpirun and the message.
    ``PR_SET_PDEATHSIG`` is not used, because it can send the signal once for each thread that
    ends, and after a second signal mpirun exits while the ranks continue.
    """
    waits = ["sh", "-c", 'read -r pid && { read -r line; kill -TERM "$pid"; }']
    reads, writes = os.pipe()
    # This process also keeps the end for reading open: a write can then not raise SIGPIPE.
    with os.fdopen(reads) as source, os.fdopen(writes, "wb", buffering=0) as sink:
        shell = start(waits, stdin=source, stdout=subprocess.DEVNULL)
        try:
            yield lambda: sink.write(f"{os.getpid()}\n".encode())
        finally:
            shell.kill()
            shell.wait()


class _Ending:
    """End a launch with a sequence of signals up to SIGKILL; each signal is sent once."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        note: str | None,
        counts: Counter[str],
        *,
        grace_s: float,
        save_s: float,
    ) -> None:
        self.process, self.note, self.counts = process, note, counts
        self.grace_s, self.save_s = grace_s, save_s
        self.timeout_s = Settings.from_env().timeout  # longest wait of ranks for each other
        self.timed_out = False
        self.has_killed = False
        self.is_granted = False  # the ranks got a request to stop, and no other signal after it
        self.first_signal: int | None = None
        self.timers: list[threading.Timer] = []

    def wait(self) -> int:
        """Wait for mpirun, and end it if it hangs.

        The mpirun of Open MPI can deadlock at its end after a rank failed before ``MPI_Init``, or
        after a node with its daemon was lost. No mpirun reports a rank that exits with 0 before
        ``MPI_Init``: the other ranks wait for this rank forever. They also wait forever in
        ``MPI_Finalize`` for a rank that is stopped.
        """
        orphaned_s = few_s = late_s = 0.0
        below: dict[int, int] = {}
        while True:
            try:
                code = self.process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                below = rank_processes.below(self.process.pid)
                if self.counts[FAILED]:  # ranks of other nodes wait forever
                    self.kill()
                has_lost = bool(self.counts[LOST])
                is_over = has_lost or rank_processes.has_only_dead_children(self.process.pid)
                orphaned_s = orphaned_s + LOOK_S if is_over else 0
            else:
                if code == -signal.SIGKILL and not self.has_killed:
                    rank_processes.kill_orphans(below)
                return code
            if orphaned_s >= ORPHANED_S:
                what = "the loss of a node" if has_lost else "its ranks have ended"
                write_line(f"mpirun hangs after {what}, and is killed")
                self.kill()
            gone, late = rank_processes.missing_ranks(below)
            few_s = few_s + LOOK_S if gone else 0
            if few_s >= FEW_S:
                write_line(
                    f"all ranks must call MPI_Init, but {gone} ended before MPI_Init, in which "
                    f"the other ranks wait: all ranks are killed; let no rank exit before MPI_Init"
                )
                self.counts[FAILED] += 1
                self.kill()
            late_s = late_s + LOOK_S if late else 0
            if late_s > self.timeout_s:
                write_line(
                    f"a wait for other ranks must end within HPCTRAIN_TIMEOUT={self.timeout_s:g} "
                    f"s, but the launch has waited longer {late}; all ranks are killed; find the "
                    f"cause, or increase HPCTRAIN_TIMEOUT"
                )
                self.counts[FAILED] += 1
                self.kill()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Stop the ranks after the first signal, and kill the ranks after the second."""
        if number == signal.SIGUSR1:
            self.send_to_mpirun(number)
        elif number == signal.SIGTSTP:
            self.pause()
        elif self.first_signal is not None:
            self.kill()
        else:
            self.first_signal = number
            can_stop = rank_processes.can_stop_on_request(self.process.pid)
            if can_stop:
                self.request_stop(number)
            self.end(number, after_s=self.save_s if can_stop else 0.0)

    def on_timeout(self) -> None:
        """End a launch that ran past its limit."""
        self.timed_out = True
        self.end(signal.SIGTERM)

    def request_stop(self, number: int) -> None:
        """Send SIGUSR1 to all ranks, and write the reason to a file for ranks on this host."""
        self.is_granted = True
        if self.note is not None:
            with contextlib.suppress(OSError):
                Path(self.note).write_text(signal.Signals(number).name, encoding="ascii")
        self.send_to_mpirun(signal.SIGUSR1)
        write_line(
            f"the ranks are requested to save their state and stop within {self.save_s:.0f} s; a "
            f"second signal kills the ranks at once"
        )

    def end(self, number: int, *, after_s: float = 0.0) -> None:
        """Send a signal, then SIGTERM, then SIGKILL, ``grace_s`` seconds apart."""
        steps = (lambda: self.send(number), lambda: self.send(signal.SIGTERM), self.kill)
        for i, step in enumerate(steps):
            self.after(after_s + i * self.grace_s, step)

    def after(self, seconds: float, step: Callable[[], object]) -> None:
        """Call ``step`` in another thread after ``seconds``; ``close`` cancels the call."""
        timer = threading.Timer(seconds, step)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    def send_to_mpirun(self, number: int) -> None:
        """Send a signal to mpirun only; mpirun forwards the signal to all ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def pause(self) -> None:
        """Suspend the ranks and this process after Ctrl-Z, until this process is continued."""
        self.send_to_mpirun(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.send_to_mpirun(signal.SIGCONT)

    def send(self, number: int) -> None:
        """Send a signal to the process group of mpirun."""
        self.is_granted = False
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill mpirun and each of its descendants, as ranks have separate process groups."""
        self.is_granted = False
        if self.process.returncode is not None:
            return
        self.has_killed = True
        for pid in [*rank_processes.descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Cancel all signals that are scheduled."""
        for timer in self.timers:
            timer.cancel()


RETRY_S = 0.5  # interval of attempts to read while another program has the terminal


def forward_input(sink: IO[bytes]) -> None:
    """Start a thread that copies the terminal input to ``sink``, and at its end closes ``sink``.

    The thread is a daemon, so the process does not wait for it.
    """
    source = sys.__stdin__
    assert source is not None

    def forward() -> None:
        # A background process that reads the terminal is stopped, unless the signal is blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
        with contextlib.suppress(OSError), sink:  # a pipe without a reader
            while True:
                try:
                    typed = os.read(source.fileno(), 4096)
                except OSError:  # this process is in the background, or the terminal is closed
                    time.sleep(RETRY_S)
                    continue
                if not typed:
                    return
                sink.write(typed)
                sink.flush()

    threading.Thread(target=forward, daemon=True, name="terminal input").start()
