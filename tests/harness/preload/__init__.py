"""Start ranks six times as fast, by forks of a Python process that has imported torch.

A test uses ``python()`` instead of ``sys.executable`` to start ranks. mpirun then starts stubs,
which take a few milliseconds. A stub sends its environment, working directory, limits and open
descriptors to a server, and the server forks the rank. The stub forwards signals to the rank and
exits with its exit code.

Tests that check parent processes, send SIGSTOP or measure imports must not use ``python()``. A
stub starts a new Python process if the server cannot reproduce the request: options of Python,
variables that libraries read at import, or another network namespace.
"""

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
STUB = Path(__file__).with_name("stub.py")


def python(environment: str = ".venv") -> list[str]:
    """Return the command that starts a preloaded Python of ``.venv`` or ``.venv-mpich``."""
    own = Path(sys.executable)
    mine = own.parent.parent.name == environment
    interpreter = own if mine else ROOT / environment / "bin/python"
    return [str(interpreter), "-I", "-S", str(STUB), _server(interpreter)]


@functools.cache
def _server(interpreter: Path) -> str:
    """Start the server of an interpreter, once per process; return the path of its socket.

    The server ends with this process, when its standard input closes.
    """
    folder = tempfile.TemporaryDirectory(prefix="preload-", ignore_cleanup_errors=True)
    socket = f"{folder.name}/socket"
    process = subprocess.Popen(
        [interpreter, "-m", "tests.harness.preload.server", socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def end() -> None:
        process.stdin.close()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    assert process.stdout.readline() == "ready\n", "the server of preloaded ranks must print ready"
    return socket
