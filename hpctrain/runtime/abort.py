"""Failure of one rank: the rank prints its error, prefixed by its rank, and all ranks end."""

import atexit
import contextlib
import faulthandler
import io
import math
import os
import signal
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
from hpctrain.comm.node.kernel import library
from hpctrain.comm.survivors import failed
from hpctrain.core import logs
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

ABORT_S = 2.0  # longest wait for ``MPI_Abort``; then the process exits
ROOT_PRINTS_S = 5.0  # time for rank 0 to print an error, and for its launcher to end all ranks
STAGGER_S, OF_HOST_S = 1.0, 5.0
"""Delays in seconds before an error is printed, see ``turn_s``."""


def leave(
    presence: "Liveness", hooks: "FailureHooks", compare: "Callable[[Gather], str]" = lambda _: ""
) -> str:
    """Wait until every rank has reached the end of the program; if that fails, end all ranks.

    Collective. ``shutdown()`` and the exit of the interpreter call this function before they free
    any resource.

    Args:
        presence: object that checks that the other ranks are alive.
        hooks: object that ends all ranks after an error.
        compare: function that is called when all ranks have arrived.

    Returns:
        The result of ``compare``.
    """
    with contextlib.suppress(Exception):  # a rank may be killed while it waits
        sys.stdout.flush()
    try:
        return presence.wait_for_end(compare)
    except BaseException as error:  # at exit Python would only print the error
        hooks.end(error)


def turn_s(rank: int, *, is_first: bool) -> float:
    """Return the seconds to wait before this rank prints its error and ends all ranks.

    The first abort ends all other ranks. Rank 0 prints at once. On each host, the rank that fails
    first (``is_first``) prints before the other ranks, which wait ``OF_HOST_S`` longer. The delay
    grows with the logarithm of the rank: if 10,000 ranks fail together, only a few print before
    they are ended.
    """
    if rank == 0:
        return 0.0
    return STAGGER_S * (1 + 0.3 * math.log2(rank)) + (0.0 if is_first else OF_HOST_S)


@contextlib.contextmanager
def start_guard(settings: "Settings") -> "Iterator[None]":
    """Handle uncaught errors of the block, in which ranks join the world.

    Every process of a launch raises a ``LaunchError`` and prints it in one line. Rank 0 prints
    first, since most launchers then end the other ranks. A ``RankLostError`` ends all ranks:
    otherwise ``MPI_Finalize`` would wait for the lost rank.
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
            is_first = process.is_first("failed start")
            time.sleep(ROOT_PRINTS_S + turn_s(launched.rank, is_first=is_first))
        sys.stderr.write(f"hpctrain: {value}\n")

    sys.excepthook = hook


class FailureHooks:
    """Hooks of one process that end all ranks after an uncaught exception, and report crashes.

    Not collective. Used in worlds of more than one rank. An exception in a thread that neither
    computes nor communicates, such as the thread of a progress bar, is only printed.

    Args:
        world: ranks to end.
        log_dir: directory of the log files, to which errors are written in addition to stderr.
        recovers: True if the world survives the loss of a rank; the launcher then ends the ranks.
    """

    def __init__(self, world: "MpiComm", log_dir: Path | None, *, recovers: bool = False) -> None:
        self._world, self._rank, self._recovers = world, world.rank, recovers
        self._owner = os.getpid()
        self._log = log_dir and logs.file_in(log_dir, world.rank)
        self._ending = threading.Lock()
        self.last_words: list[Callable[[], object]] = []
        """Functions that write unsaved records to disk; called before this rank ends all ranks."""
        self.communicates: Callable[[int | None], bool] = lambda _thread: False
        """Returns True if the thread with the given identifier communicates with other ranks."""
        # Each access to a method creates a new object, but ``uninstall`` compares by identity.
        self._hook, self._thread_hook = self._on_exception, self._on_thread_exception
        if self._log is not None and process.is_first("log directory"):
            self._log.parent.mkdir(parents=True, exist_ok=True)
        self.install()
        atexit.register(self.end_blocked)  # runs after ``leave``, registered later

    def install(self) -> None:
        """Install the hooks again after ``uninstall``."""
        self._previous, self._previous_thread = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._hook, self._thread_hook
        self._crash = CrashReport(self._rank, self._log)

    def uninstall(self) -> None:
        """Restore the previous hooks, unless other code has replaced these hooks."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous
        if threading.excepthook is self._thread_hook:
            threading.excepthook = self._previous_thread
        self._crash.stop()

    def end(self, error: BaseException, where: str = "") -> NoReturn:
        """Report ``error`` and end all ranks."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has no effect
        if not self._ending.acquire(blocking=False):
            time.sleep(2 * ABORT_S)  # another thread ends the ranks
            os._exit(FAILED)
        code, summary = _verdict(error, self._world, recovers=self._recovers)
        details = f"{where}{''.join(traceback.format_exception(error))}"
        is_first = process.is_first("failure")
        self._write_log(details, is_durable=is_first)
        time.sleep(turn_s(self._rank, is_first=is_first))
        own = ""
        with contextlib.suppress(Exception):  # ``repr`` of a user's object may raise
            own = folded(error, self._log)
        self._print(summary or (f"{where}{own}" if own else details))
        self.abort(code)

    def end_blocked(self) -> None:
        """End all ranks if a thread is still inside an abandoned MPI call.

        Called at exit, after ``leave``: ``MPI_Finalize`` would free memory that the thread uses.
        """
        # The interpreter is shutting down, so this function must not import the module. If the
        # module is not loaded, no MPI call was made.
        calls = sys.modules.get("hpctrain.comm.watched_calls")
        if os.getpid() == self._owner and calls is not None and calls.is_blocked():
            rank = f"rank {self._rank}"
            self.end(
                RankLostError(
                    f"all ranks must complete each call, but {rank} is still inside an MPI call "
                    f"whose wait has failed, so that MPI cannot be finalized; an earlier error of "
                    f"{rank} gives the reason"
                )
            )

    def abort(self, code: int) -> NoReturn:
        """End all ranks with exit code ``code``; this process exits within ``ABORT_S`` seconds."""
        # faulthandler has a timer in C; a Python thread could not run while MPI_Abort holds the
        # GIL.
        with contextlib.suppress(Exception):  # without free file descriptors there is no timer
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(ABORT_S, exit=True, file=nowhere)
        for function in (*self.last_words, sys.stdout.flush):
            with contextlib.suppress(Exception):
                function()
        try:
            if self._recovers:  # MPI_Abort would end this rank only
                self._print(f"{ENDING}{code}")
                end_launch()
            else:
                self._world.Abort(code)
        finally:
            os._exit(code)

    def _write_log(self, text: str, *, is_durable: bool = False) -> None:
        if self._log is None:
            return
        with contextlib.suppress(OSError), logs.opened(self._log) as log:
            log.write(self._tagged(text))
            log.flush()
            if is_durable:
                os.fsync(log.fileno())

    def _print(self, text: str) -> None:
        with contextlib.suppress(Exception):
            # One write keeps the lines of a rank together. The hook of torch.distributed replaces
            # stderr by a buffer that it prints too late, after this process has ended.
            hidden = isinstance(sys.stderr, io.StringIO) and sys.__stderr__
            stream = hidden or sys.stderr
            stream.write(self._tagged(text))
            stream.flush()

    def _tagged(self, text: str) -> str:
        return "".join(f"[rank {self._rank}] {line}\n" for line in text.splitlines())

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._owner:  # a forked child is not a rank
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
        details += "the thread neither computes nor communicates: the ranks continue without it\n"
        self._write_log(details)
        self._print(details)
        if self._previous_thread is not threading.__excepthook__:  # a hook of the program
            self._previous_thread(args)


def computes(trace: TracebackType | None) -> bool:
    """Return True if a frame of an exception belongs to torch or hpctrain, or uses their objects.

    A frame uses their objects if one of its local variables is a tensor, a model, an optimizer or
    another object of torch or hpctrain.
    """
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    names = [str(frame.f_globals.get("__name__")) for frame in frames]
    values = [value for frame in frames for value in frame.f_locals.values()]
    names += [str(kind.__module__) for value in values for kind in type(value).__mro__]
    return any(name.partition(".")[0] in ("torch", "hpctrain") for name in names)


_MPI_RULE = (
    "an MPI communicator, such as MPI.COMM_WORLD, must not be used after the loss of a rank; "
    "in hpctrain train and hpctrain.elastic.run communicate through hpctrain, or through a "
    "communicator that each call of the function creates by hpctrain.current().ranks.Dup()"
)


_OUTSIDE_RULE = (
    "under launch --recover the other ranks can only continue if a rank dies inside the function "
    "of hpctrain.elastic.run, or while hpctrain train trains, but this loss was outside; "
    "communicate inside the function, or restart from a checkpoint by launch --restart N"
)


def _verdict(error: BaseException, world: "MpiComm", *, recovers: bool) -> tuple[int, str]:
    """Return the exit code, and the lines to print instead of a traceback, if any."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted; all ranks end"
    is_of_mpi = is_loss(error)
    if not is_of_mpi and not isinstance(error, RankLostError):
        return FAILED, ""
    modules = [str(f.f_globals.get("__name__")) for f, _ in traceback.walk_tb(error.__traceback__)]
    text, rule = str(error), _MPI_RULE if is_of_mpi else ""
    is_outside = recovers and "hpctrain.runtime.recovery" not in modules
    if is_outside and any(name.startswith("hpctrain.") for name in modules):
        with contextlib.suppress(Exception):  # MPI may already be finalized
            if is_of_mpi and (dead := failed(world)):
                text = f"{format_ranks(dead)} of {world.size} died"
        if "died" in text:  # the rule does not apply to a rank that has exited
            rule = _OUTSIDE_RULE
    lines = user_lines(error) if rule else []
    return RANK_LOST, "\n".join([*lines, f"{text}; {rule}{'; ' if rule else ''}all ranks end"])


class CrashReport:
    """Reports crashes to stderr and to the log file, with the rank in each line.

    ``faulthandler`` writes to only one file and does not add the rank, and a crashed process
    cannot run Python code. So ``faulthandler`` writes to memory, and a function of the compiled
    kernel copies the lines to stderr and the log file. A rank that does not crash needs no
    additional process and no additional file. Without the kernel, ``faulthandler`` prints to
    stderr without the rank. If the user has enabled ``faulthandler``, this class changes nothing.

    Args:
        rank: this rank.
        log: log file, or None.
    """

    def __init__(self, rank: int, log: Path | None) -> None:
        self._enabled = not faulthandler.is_enabled()
        self._memory: int | None = None
        if not self._enabled:
            return
        if (found := library()) is not None:
            with contextlib.suppress(OSError):  # without free file descriptors
                self._memory = os.memfd_create("hpctrain-crash")
        if found is not None and self._memory is not None:
            tag, path = f"[rank {rank}] ".encode(), os.fsencode(log or "")
            found.calls.hpctrain_report_crashes(self._memory, tag, path)
            faulthandler.enable(self._memory)
        elif sys.__stderr__:
            faulthandler.enable(sys.__stderr__.fileno())

    def stop(self) -> None:
        """Stop reporting crashes."""
        if not self._enabled:
            return
        self._enabled = False
        faulthandler.disable()
        found = library()
        if found is not None and self._memory is not None:
            found.calls.hpctrain_report_crashes(-1, b"", b"")
            os.close(self._memory)
