"""Run ``mpirun`` to its end: signals handed on, every way out bounded in time."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from hpctrain.errors import LaunchError

GRACE_S = 5.0
"""Time that ranks get after a signal, and again after the SIGTERM that follows it."""

LOOK_S, ORPHANED_S = 1.0, 5.0
"""Between two looks at mpirun's children, and how long it may outlive the last of them."""

TIMED_OUT = 124
"""Exit code of a launch that ran past its limit, as ``timeout`` has it."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def supervise(
    line: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
) -> int:
    """Run a command line of ``mpiexec.command`` and return its exit code.

    SIGINT, SIGTERM and SIGHUP go to mpirun's process group; who is still there ``grace_s``
    seconds later gets SIGTERM, then SIGKILL, ranks included. A second signal kills at once.
    SIGUSR1 goes to mpirun, which hands it to the ranks: they may stop in their own time.
    A signal that ends mpirun itself comes back as 128 plus its number, as a shell has it.

    Args:
        line: the command line.
        environ: environment of mpirun, see ``mpiexec.environment``.
        timeout_s: end the launch after so many seconds and return 124.
        grace_s: see above.

    Raises:
        LaunchError: the program cannot be started.
        KeyboardInterrupt: Ctrl-C came; raised when mpirun has ended.
    """
    terminal = sys.__stdin__ is not None and sys.__stdin__.isatty()
    try:
        process = subprocess.Popen(  # noqa: S603 - this is the user's command
            line,
            env=None if environ is None else dict(environ),
            # mpirun would swallow a file or pipe that belongs to the script around it.
            stdin=None if terminal else subprocess.DEVNULL,
            # On a terminal it stays in our group: only the foreground may read, and a
            # Ctrl-C or Ctrl-Z reaches it without us.
            process_group=None if terminal else 0,
        )
    except OSError as error:
        raise LaunchError(f"{line[0]} cannot be started: {error}") from None
    ending = _Ending(process, own_group=not terminal, grace_s=grace_s)
    limit = threading.Timer(timeout_s or 0, ending.on_timeout)
    limit.daemon = True
    if timeout_s:
        limit.start()
    try:
        with ending.catching():
            code = ending.wait()
    finally:
        limit.cancel()
        ending.close()
    if ending.first_signal == signal.SIGINT:
        raise KeyboardInterrupt
    if ending.timed_out:
        return TIMED_OUT
    return code if code >= 0 else 128 - code


class _Ending:
    """The ladder from a polite signal to SIGKILL; each rung is taken once."""

    def __init__(self, process: subprocess.Popen[bytes], *, own_group: bool, grace_s: float):
        self.process = process
        self.own_group = own_group
        self.grace_s = grace_s
        self.timed_out = False
        self.first_signal: int | None = None
        self.timers: list[threading.Timer] = []

    def wait(self) -> int:
        """Wait for mpirun, also for one that does not end although all its ranks have.

        Open MPI's can deadlock in its own end when a rank has failed before ``MPI_Init``.
        """
        orphaned_s = 0.0
        while True:
            try:
                return self.process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                orphaned_s = orphaned_s + LOOK_S if has_only_dead_children(self.process.pid) else 0
            if orphaned_s >= ORPHANED_S:
                sys.stderr.write(
                    "hpctrain: mpirun hangs after its ranks have ended; it is killed\n"
                )
                self.kill()

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Take the signals over while in the block; only the main thread may."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        # nohup and a shell's `&` ignore some: these stay ignored.
        taken = [n for n, old in before.items() if old not in (signal.SIG_IGN, None)]
        for number in taken:
            signal.signal(number, self.on_signal)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Hand the first signal on and start the ladder; kill at the second."""
        if number == signal.SIGUSR1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)
            return
        if self.first_signal is not None:
            self.kill()
            return
        self.first_signal = number
        # The terminal has given its Ctrl-C to mpirun already: two would mean "at once" to it.
        self.end(number, already_sent=number == signal.SIGINT and not self.own_group)

    def on_timeout(self) -> None:
        """End a launch that ran past its limit."""
        self.timed_out = True
        self.end(signal.SIGTERM)

    def end(self, number: int, *, already_sent: bool = False) -> None:
        """Send a signal, then SIGTERM, then SIGKILL, ``grace_s`` seconds apart."""
        if not already_sent:
            self.send(number)
        rungs = (lambda: self.send(signal.SIGTERM), self.kill)
        for i, rung in enumerate(rungs, start=1):
            timer = threading.Timer(i * self.grace_s, rung)
            timer.daemon = True
            timer.start()
            self.timers.append(timer)

    def send(self, number: int) -> None:
        """Signal mpirun's process group, or mpirun alone where the group is ours too."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self.own_group:
                os.killpg(self.process.pid, number)
            else:
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill mpirun and everything below it: ranks sit in process groups of their own."""
        if self.process.returncode is not None:
            return
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Take no further rung."""
        for timer in self.timers:
            timer.cancel()


def has_only_dead_children(pid: int) -> bool:
    """Say whether a process has children that ended, and none that lives."""
    children: list[str] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += listed.read_text().split()
    states = set()
    for child in children:
        with contextlib.suppress(OSError):
            states.add(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0])
    return bool(states) and states <= {"Z", "X"}


def descendants(pid: int) -> list[int]:
    """List the living processes below ``pid``, deepest last; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold blanks: the parent is the second word after it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found
