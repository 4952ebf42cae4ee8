"""The processes of a decode pool: a server without MPI and threads, and the workers it forks.

The server is a separate program, because a fork of the rank would copy locks held by threads and
the state of MPI. The server never runs the user's script, because ``from mpi4py import MPI`` in
the script would initialize MPI in the server. The server imports torch once and then forks the
workers.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from importlib import import_module
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import torch

from hpctrain.core.errors import DataError
from hpctrain.core.user_error import user_lines
from hpctrain.data.transform import begin_generators
from hpctrain.data.workers.shm_message import pack, portable
from hpctrain.launch.mpiexec import marks_rank

END_S = 5.0
"""Seconds before processes that do not end are killed; they usually end within one second."""

_BOOT = """
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given["path"]
from hpctrain.data.workers.processes import serve
serve(given["workers"], given["notes"], given["control"])
"""


class Processes:
    """Server and workers of a decode pool, the connections to them, and the first error."""

    def __init__(self, num_workers: int) -> None:
        pairs = [socket.socketpair() for _ in range(num_workers + 1)]
        theirs = [their.fileno() for _, their in pairs]
        self.notes = [Notes() for _ in range(num_workers)]
        notes = [each.descriptor for each in self.notes]
        given = {
            "path": list(map(str, sys.path)),
            "workers": theirs[:-1],
            "notes": notes,
            "control": theirs[-1],
        }
        try:
            # A new session: signals of a terminal or a scheduler must reach only the rank.
            self._server = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, "-c", _BOOT, json.dumps(given)],
                env=_environment(),
                pass_fds=theirs + notes,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise DataError(
                f"cannot start the processes of a decode pool: {error}; request more "
                f"processes or memory for the job, or read in threads: workers=0"
            ) from error
        finally:
            for _, their in pairs:
                their.close()
        self._sockets = [mine for mine, _ in pairs]
        self.workers = [Connection(os.dup(mine.fileno())) for mine in self._sockets[:-1]]
        self._control = Connection(os.dup(self._sockets[-1].fileno()))
        self._asking = threading.Lock()
        self._deaths: dict[int, tuple[int, int]] = {}
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> BaseException:
        """Store ``error`` unless a worker failed before, and return the first error.

        All later batches raise the first error.
        """
        self.error = self.error or error
        return self.error

    def death_of(self, number: int) -> DataError:
        """Return a ``DataError`` with the exit code or signal of a worker that ended."""
        story = "could not be started, or ended together with its server"
        if death := self._wait_for_death(number):
            pid, code = death
            signalled = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
            story = f"(process {pid}) {signalled or f'ended with exit code {code}'}"
        return DataError(
            f"decode worker {number} of {len(self.workers)} {story}; check its output, and "
            f"whether the memory of the job is enough for its workers{self._stack_of(number)}"
        )

    def abort(self, number: int, limit_s: float, work: str) -> DataError:
        """End a worker that exceeded ``limit_s``; return a ``DataError`` that names ``work``."""
        with self._asking, contextlib.suppress(OSError):
            self._control.send(number)
        death = self._wait_for_death(number)
        process = f" (process {death[0]})" if death else ""
        return DataError(
            f"decode worker {number} of {len(self.workers)}{process} must answer within "
            f"{limit_s:g} s, but was still at {work}; check its stack, or use a larger "
            f"worker_timeout_s{self._stack_of(number)}"
        )

    def _wait_for_death(self, number: int) -> tuple[int, int] | None:
        """Wait until a worker ends; return its process id and exit code, or None if unknown."""
        with self._asking, contextlib.suppress(OSError, EOFError):
            while number not in self._deaths and self._control.poll(END_S):
                worker, pid, code = self._control.recv()
                self._deaths[worker] = pid, code
        return self._deaths.get(number)

    def _stack_of(self, number: int) -> str:
        stack = self.notes[number].stack()
        return f"\n{stack}" if stack else ""

    def end(self) -> None:
        """End the server and all workers, and wait for the server."""
        self.fail(DataError("the decode pool was closed"))
        for mine in self._sockets:
            # Also wakes the threads that wait for an answer.
            with contextlib.suppress(OSError):
                mine.shutdown(socket.SHUT_RDWR)
            mine.close()
        try:
            self._server.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        for notes in self.notes:
            notes.close()


def _environment() -> dict[str, str]:
    """Return the environment without variables of the MPI launcher; torch gets one thread."""
    kept = {name: text for name, text in os.environ.items() if not marks_rank(name)}
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return kept | dict.fromkeys(threads, "1") | {"MPI4PY_RC_INITIALIZE": "0"}


_NONE, _NUMBER_BYTES = -1, 8
_MODULES = "\n\nExtension modules: "  # ``faulthandler`` writes this after the stacks


class Notes:
    """Memory shared by rank and worker: index of the current sample, and stacks after a signal.

    ``descriptor`` is the inherited descriptor of a memory file; None creates a new file.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("hpctrain-notes", os.MFD_CLOEXEC)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self.note(None)

    @property
    def descriptor(self) -> int:
        """Descriptor of the memory file, which the worker inherits."""
        return self._file.fileno()

    @property
    def sample(self) -> int | None:
        """Index of the current sample; None between samples and in transforms of batches."""
        number = int.from_bytes(os.pread(self.descriptor, _NUMBER_BYTES, 0), "little", signed=True)
        return None if number == _NONE else number

    def note(self, index: int | None) -> None:
        """Store the index of the current sample; None after its transform."""
        number = _NONE if index is None else index
        os.pwrite(self.descriptor, number.to_bytes(_NUMBER_BYTES, "little", signed=True), 0)

    def catch_signals(self) -> None:
        """Let ``faulthandler`` write the stacks of all threads to this file at a fatal signal."""
        os.lseek(self.descriptor, 0, os.SEEK_END)
        faulthandler.enable(self.descriptor)

    def stack(self) -> str:
        """Return the stacks that the worker wrote at a fatal signal, or an empty string."""
        with contextlib.suppress(OSError, ValueError):  # if the file is closed
            size = os.fstat(self.descriptor).st_size - _NUMBER_BYTES
            text = os.pread(self.descriptor, size, _NUMBER_BYTES).decode(errors="replace")
            # The signal is named in a separate paragraph, before the stacks.
            return text.partition(_MODULES)[0].partition("\n\n")[2].strip()
        return ""

    def close(self) -> None:
        """Close the memory file."""
        self._file.close()


_Alive: TypeAlias = dict[int, tuple[int, int]]
"""Index and process id of each worker. The key is the descriptor of a pipe that closes when the
worker ends."""

GRACE_S = 1.0  # seconds that a worker may continue after the rank has closed the pool or ended
STACK_S = 2.0  # seconds that an aborted worker may take to write its stack before it is killed


def serve(workers: list[int], notes: list[int], control: int) -> None:
    """Fork the workers, report their exits to the rank, and end them when the rank ends.

    Args:
        workers: for each worker, the descriptor of its socket to the rank.
        notes: for each worker, the descriptor of its ``Notes``.
        control: descriptor of the server's socket to the rank. On this socket, the rank sends the
            index of a worker that the server must end.
    """
    for kind in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # These signals are meant for the rank, which ends the server by closing the sockets.
        signal.signal(kind, signal.SIG_IGN)
    import_module("hpctrain.data.reader")  # one import for all workers
    alive: _Alive = {}
    for number, descriptor in enumerate(workers):
        end, held = os.pipe()
        if not (pid := os.fork()):
            # A second copy of a socket would keep the connection open after its owner ends.
            for other in {*workers[number:], control} - {descriptor}:
                os.close(other)
            _run(descriptor, notes[number])
        for ours in (descriptor, held):
            os.close(ours)
        alive[end] = number, pid
    with contextlib.suppress(OSError, EOFError):  # the rank is gone, or has closed the pool
        _watch(Connection(control), alive)
    ends = set(alive)
    while ends and (ended := wait([*ends], GRACE_S)):  # idle workers end when their sockets close
        ends.difference_update(ended)
    os.killpg(0, signal.SIGKILL)


def _watch(rank: "Connection[Any, Any]", alive: _Alive) -> None:
    """Report the exit of each worker to the rank, and abort each worker that the rank requests."""
    while True:
        for ready in wait([rank, *alive]):
            if ready is rank:
                named = rank.recv()
                for end in [end for end, (number, _) in alive.items() if number == named]:
                    _abort(alive[end][1], end)
            elif isinstance(ready, int):
                number, pid = alive.pop(ready)
                rank.send((number, pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _abort(pid: int, end: int) -> None:
    # A worker that was stopped writes its stack once it continues.
    for kind in (signal.SIGABRT, signal.SIGCONT):
        os.kill(pid, kind)
    if not wait([end], STACK_S):
        os.kill(pid, signal.SIGKILL)


def _run(descriptor: int, notes: int) -> None:
    """Run a forked worker, and exit without the exit handlers inherited from the server."""
    code = 1
    try:
        _work(Connection(descriptor), Notes(notes))
        code = 0
    except (EOFError, ConnectionError):
        code = 0  # the rank is gone, or has closed the pool
    except BaseException:  # this process has no caller
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(rank: "Connection[Any, Any]", notes: Notes) -> None:
    """Load the task, then answer every request with a ``ShmMessage`` or a failure."""
    notes.catch_signals()
    torch.set_num_threads(1)
    rank.send("started")
    try:
        task = cloudpickle.loads(rank.recv_bytes())
    except Exception as error:  # raised by a user's module at its import
        rank.send(_failure(error))
        return
    rank.send("ready")
    while True:
        indices, epoch, seed = rank.recv()
        try:
            # Random numbers depend on the samples, not on the worker.
            begin_generators(indices, epoch, seed)
            message, descriptor = pack(task(indices, epoch, seed, notes.note))
        except Exception as error:  # the rank raises it
            rank.send(_failure(error))
            continue
        finally:
            notes.note(None)
        rank.send(message)
        if descriptor is not None:
            reduction.send_handle(rank, descriptor, 0)
            os.close(descriptor)


def _failure(error: Exception) -> tuple[Exception, str, str]:
    """Return an error that can be pickled, the user's frames, and the whole traceback."""
    whole = "".join(traceback.format_exception(error))
    return portable(error), "\n".join(user_lines(error)), whole
