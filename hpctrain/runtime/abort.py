"""One rank fails: it says why, under its rank, and all ranks end at once."""

import atexit
import contextlib
import faulthandler
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from hpctrain.cluster import env, process
from hpctrain.cluster.env import ENDING, RANK_LOST
from hpctrain.cluster.libraries import end_launch
from hpctrain.comm.mpi_start import is_loss
from hpctrain.core.errors import LaunchError, RankLostError
from hpctrain.core.units import format_ranks
from hpctrain.core.user_error import folded, user_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpctrain.comm.liveness import Gather, Liveness
    from hpctrain.comm.mpi_start import MpiComm
    from hpctrain.core.config import Settings

FAILED = 1
INTERRUPTED = 130

ABORT_S = 2.0  # how long ``MPI_Abort`` may take before the process ends without it
ROOT_SPEAKS_S = 5.0  # for rank 0 to print an error, and its launcher to end the other ranks
STAGGER_S, LONGEST_STAGGER_S = 1.0, 1.5
"""What strikes all ranks at once is told in rank order: the first abort silences the others."""


def leave(
    presence: "Liveness", hooks: "FailureHooks", compare: "Callable[[Gather], str]" = lambda _: ""
) -> str:
    """Wait until every rank has come to its end; end all ranks if one of them never will.

    Then all ``compare`` what they have, and what that returns is returned.

    Collective. ``shutdown()`` calls it, and the interpreter at exit, before anything is freed.
    """
    with contextlib.suppress(Exception):  # a rank that is killed while it waits has printed all
        sys.stdout.flush()
    try:
        return presence.farewell(compare)
    except BaseException as error:  # at exit Python would print it and go on
        hooks.end(error)


@contextlib.contextmanager
def start_guard(settings: "Settings") -> "Iterator[None]":
    """Handle errors of the block, in which ranks join the world, that no caller catches.

    A ``LaunchError`` is raised by every process of a launch and printed in one line, by rank 0
    first, since most launchers end the others then. A ``RankLostError`` ends all ranks: without
    that ``MPI_Finalize`` would wait for the lost rank.
    """
    try:
        yield
    except LaunchError as error:
        if not process.is_child():
            _print_once(error)
        raise
    except RankLostError:
        from hpctrain.comm.mpi_start import MPI  # noqa: PLC0415 - a world of one needs no MPI

        FailureHooks(MPI.COMM_WORLD, settings.log_dir, recovers=settings.recover)
        raise


def _print_once(own: LaunchError) -> None:
    launched, previous = env.launched(), sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not own:
            previous(kind, value, trace)
            return
        if launched is not None and launched.rank:
            time.sleep(ROOT_SPEAKS_S)
        sys.stderr.write(f"hpctrain: {value}\n")

    sys.excepthook = hook


class FailureHooks:
    """The hooks of one process for exceptions that nobody catches, and for crashes.

    For worlds of more than one rank: a world of one has nobody to end.
    """

    def __init__(self, world: "MpiComm", log_dir: Path | None, *, recovers: bool = False) -> None:
        """Let an exception that nobody catches end all ranks from now on. Not collective.

        In a thread that neither computes nor communicates, such as that of a progress bar, it is
        only told. All that stderr gets ``rank-N.log`` in the folder ``log_dir`` gets too. A world
        that ``recovers`` outlives a rank, so its launcher ends it.
        """
        self._world, self._rank, self._recovers = world, world.rank, recovers
        self._owner = os.getpid()
        self._log = log_dir and log_dir / f"rank-{world.rank}.log"
        self._ending = threading.Lock()
        self.last_words: list[Callable[[], object]] = []
        """Called before this rank ends all ranks: what writes down what is not on disk yet."""
        self.communicates: Callable[[int | None], bool] = lambda _thread: False
        """Says whether a thread, by its identifier, communicates with other ranks."""
        # Bound once: uninstall() compares by identity.
        self._hook, self._thread_hook = self._on_exception, self._on_thread_exception
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        self.install()
        atexit.register(self.end_blocked)  # before the leave is registered, which comes first

    def install(self) -> None:
        """Take the place of the hooks that are there, as at first; after ``uninstall``."""
        self._previous, self._previous_thread = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._hook, self._thread_hook
        self._crash = CrashReport(self._rank, self._log)

    def uninstall(self) -> None:
        """Put back the hooks that were there, unless somebody took them over after us."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous
        if threading.excepthook is self._thread_hook:
            threading.excepthook = self._previous_thread
        self._crash.stop()

    def end(self, error: BaseException, where: str = "") -> NoReturn:
        """Report ``error`` and end all ranks."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C changes nothing
        if not self._ending.acquire(blocking=False):
            time.sleep(2 * ABORT_S)  # another thread is at it
            os._exit(FAILED)
        code, summary = _verdict(error, self._world, recovers=self._recovers)
        details = f"{where}{''.join(traceback.format_exception(error))}"
        self._write_log(details)
        time.sleep(min(STAGGER_S * self._rank, LONGEST_STAGGER_S))
        own = ""
        with contextlib.suppress(Exception):  # whatever a user's object does when it is looked at
            own = folded(error, self._log)
        self._say(summary or (f"{where}{own}" if own else details))
        self.abort(code)

    def end_blocked(self) -> None:
        """End all ranks if a thread is still inside a call of MPI that was given up.

        Called at exit, after the ranks have taken leave: ``MPI_Finalize`` would free what that
        thread uses.
        """
        # Not imported here: the interpreter shuts down. Without the module no call was made.
        calls = sys.modules.get("hpctrain.comm.watched_calls")
        if os.getpid() == self._owner and calls is not None and calls.is_blocked():
            rank = f"rank {self._rank}"
            self.end(
                RankLostError(
                    f"all ranks must complete each call, but {rank} is still inside a call of MPI "
                    f"that it has given up, so that MPI cannot end; the error of that call on "
                    f"{rank} gives the reason"
                )
            )

    def abort(self, code: int) -> NoReturn:
        """End all ranks with exit code ``code``, this one within two seconds, come what may."""
        # A timer in C: a Python thread could not run while MPI_Abort holds the GIL.
        with contextlib.suppress(Exception):  # out of descriptors, MPI_Abort must do
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(ABORT_S, exit=True, file=nowhere)
        for say in (*self.last_words, sys.stdout.flush):
            with contextlib.suppress(Exception):
                say()
        try:
            if self._recovers:  # MPI_Abort would end this rank alone
                self._say(f"{ENDING}{code}")
                end_launch()
            else:
                self._world.Abort(code)
        finally:
            os._exit(code)

    def _write_log(self, text: str) -> None:
        if self._log is None:
            return
        with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as log:
            log.write(self._tagged(text))
            log.flush()
            os.fsync(log.fileno())

    def _say(self, text: str) -> None:
        with contextlib.suppress(Exception):
            # One write: the lines of one rank stay together among those of the others. Not into
            # the buffer of torch.distributed's hook, which prints it when this process is gone.
            hidden = isinstance(sys.stderr, io.StringIO) and sys.__stderr__
            stream = hidden or sys.stderr
            stream.write(self._tagged(text))
            stream.flush()

    def _tagged(self, text: str) -> str:
        return "".join(f"[rank {self._rank}] {line}\n" for line in text.splitlines())

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._owner:  # a forked child is no rank
            self._previous(kind, error, trace)
            return
        self.end(error)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        if os.getpid() != self._owner or args.exc_value is None or args.exc_type is SystemExit:
            self._previous_thread(args)
            return
        name = args.thread.name if args.thread else "unknown"
        where = f"exception in thread {name}\n"
        ident = args.thread.ident if args.thread else None
        if computes(args.exc_traceback) or self.communicates(ident):
            self.end(args.exc_value, where)
        details = f"{where}{''.join(traceback.format_exception(args.exc_value))}"
        details += "the thread neither computes nor communicates: the ranks go on without it\n"
        self._write_log(details)
        self._say(details)
        if self._previous_thread is not threading.__excepthook__:  # the user's own
            self._previous_thread(args)


def computes(trace: TracebackType | None) -> bool:
    """Say whether an exception comes from code of torch or hpctrain, or from code with tensors.

    Code that holds a model, an optimizer or anything else of the two counts as well.
    """
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    names = [str(frame.f_globals.get("__name__")) for frame in frames]
    values = [value for frame in frames for value in frame.f_locals.values()]
    names += [str(kind.__module__) for value in values for kind in type(value).__mro__]
    return any(name.partition(".")[0] in ("torch", "hpctrain") for name in names)


_MPI_RULE = (
    "a communicator of MPI is lost with any of its ranks, MPI.COMM_WORLD too; hpctrain train and "
    "hpctrain.elastic.run go on: communicate by hpctrain in the function, or by a communicator "
    "that is made there with each call, hpctrain.current().ranks.Dup()"
)


_OUTSIDE_RULE = (
    "under launch --recover the others go on where a rank dies inside the function of "
    "hpctrain.elastic.run, or while hpctrain train trains, and this was outside: communicate "
    "inside, or let launch --restart N start again from a checkpoint"
)


def _verdict(error: BaseException, world: "MpiComm", *, recovers: bool) -> tuple[int, str]:
    """Return the exit code, and the lines that say it all where no traceback is needed."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted; all ranks end"
    is_of_mpi = is_loss(error)
    if not is_of_mpi and not isinstance(error, RankLostError):
        return FAILED, ""
    modules = [str(f.f_globals.get("__name__")) for f, _ in traceback.walk_tb(error.__traceback__)]
    text, rule = str(error), _MPI_RULE if is_of_mpi else ""
    is_outside = recovers and "hpctrain.runtime.recovery" not in modules
    if is_outside and any(name.startswith("hpctrain.") for name in modules):
        from hpctrain.comm.survivors import failed  # noqa: PLC0415 - a world of one needs no MPI

        with contextlib.suppress(Exception):  # MPI may be over
            if is_of_mpi and (dead := failed(world)):
                text = f"{format_ranks(dead)} of {world.size} died"
        if "died" in text:  # a rank that has left is no lost one
            rule = _OUTSIDE_RULE
    lines = user_lines(error) if rule else []
    return RANK_LOST, "\n".join([*lines, f"{text}; {rule}{'; ' if rule else ''}all ranks end"])


FAREWELL_S = 1.0  # time for the tagger to end once nobody can write to it any more


class CrashReport:
    """Sends what ``faulthandler`` writes to stderr and the rank's log, each line with its rank.

    ``faulthandler`` writes to one file and knows no ranks, and a crashed process can do nothing
    more: so it writes into a pipe, and a sleeping ``sed`` on the other end does the rest. It
    ends with this process, however that ends. Without ``sed`` the stack is on stderr, untagged.
    """

    def __init__(self, rank: int, log: Path | None) -> None:
        """Catch crashes from now on, unless the user has enabled ``faulthandler`` himself."""
        self._tagger: subprocess.Popen[bytes] | None = None
        self._enabled = not faulthandler.is_enabled()
        if not self._enabled:
            return
        with contextlib.suppress(OSError):
            self._tagger = _start_tagger(rank, log)
        if self._tagger and self._tagger.stdin:
            faulthandler.enable(self._tagger.stdin.fileno())
        elif sys.__stderr__:
            faulthandler.enable(sys.__stderr__.fileno())

    def stop(self) -> None:
        """Stop catching crashes."""
        if not self._enabled:
            return
        self._enabled = False
        faulthandler.disable()
        if self._tagger and self._tagger.stdin:
            self._tagger.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                # A forked child of ours may still hold the pipe: then the tagger outlives us.
                self._tagger.wait(FAREWELL_S)
        self._tagger = None


def _start_tagger(rank: int, log: Path | None) -> subprocess.Popen[bytes] | None:
    sed = shutil.which("sed")
    if sed is None:
        return None
    # stdout appends to the log; sed's own "w" would truncate it.
    out = os.open(log or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        return subprocess.Popen(  # noqa: S603 - nothing of it comes from a user
            [sed, "-u", "-e", f"s/^/[rank {rank}] /", "-e", "w /dev/stderr"],
            stdin=subprocess.PIPE,
            stdout=out,
            # Not in our process group: a Ctrl-C or the launcher's kill must not silence it.
            start_new_session=True,
        )
    finally:
        os.close(out)
