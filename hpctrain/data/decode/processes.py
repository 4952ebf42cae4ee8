"""The processes of a decode pool as the rank sees them: how they start, die and end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from hpctrain.errors import DataError
from hpctrain.launch.mpiexec import OUTER

END_S = 5.0
"""How long the processes may take to end before they are killed; they take one second at most."""

_BOOT = """
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given["path"]
from hpctrain.data.decode.server import serve
serve(given["workers"], given["control"])
"""


class Processes:
    """The server, its workers, and a connection to each; also the first error of any."""

    def __init__(self, num_workers: int) -> None:
        pairs = [socket.socketpair() for _ in range(num_workers + 1)]
        theirs = [their.fileno() for _, their in pairs]
        given = {"path": list(map(str, sys.path)), "workers": theirs[:-1], "control": theirs[-1]}
        try:
            # Its session is its own: signals of a terminal or a scheduler are for the rank.
            self._server = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, "-c", _BOOT, json.dumps(given)],
                env=_environment(),
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise DataError(
                f"cannot start the processes of a decode pool: {error}; give the job more "
                f"processes or memory, or read with threads alone: workers=0"
            ) from error
        finally:
            for _, their in pairs:
                their.close()
        self._sockets = [mine for mine, _ in pairs]
        self.workers = [Connection(os.dup(mine.fileno())) for mine in self._sockets[:-1]]
        self._control = Connection(os.dup(self._sockets[-1].fileno()))
        self._asking = threading.Lock()
        self._deaths: dict[int, str] = {}
        self.error: BaseException | None = None

    def death_of(self, number: int) -> DataError:
        """Say how a worker came to its end."""
        with self._asking, contextlib.suppress(OSError, EOFError):
            while number not in self._deaths and self._control.poll(END_S):
                worker, pid, code = self._control.recv()
                self._deaths[worker] = f"(process {pid}) {_cause(code)}"
        story = self._deaths.get(number, "could not be started, or ended with its server")
        return DataError(
            f"decode worker {number} of {len(self.workers)} {story}; see what it printed, and "
            f"whether the job's memory is enough for its workers"
        )

    def end(self) -> None:
        """End all processes and wait until they are gone."""
        self.error = self.error or DataError("the decode pool was closed")
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


def _environment() -> dict[str, str]:
    """Return the environment without what makes a process a rank, or torch take threads."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(OUTER)}
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return kept | dict.fromkeys(threads, "1") | {"MPI4PY_RC_INITIALIZE": "0"}


def _cause(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"
