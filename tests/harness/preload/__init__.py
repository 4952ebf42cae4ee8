"""Ranks that start at a sixth of the cost: forked from a Python that has imported torch already.

``python()`` is what a test puts in the place of ``sys.executable`` where it starts ranks. mpirun
then starts stubs of a few milliseconds. A stub hands all it was given over to a server, which
forks the rank: environment, folder, limits, every descriptor under its own number. Signals and
exit codes come back.

Not for tests that look at who is whose child, stop processes by SIGSTOP, or say what an import
costs; and a stub starts a Python of its own where the server would make a difference: options of
Python, variables that libraries read while they are loaded, another network.
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
    """Return the words that start a Python of ``.venv`` or ``.venv-mpich`` at once."""
    own = Path(sys.executable)
    mine = own.parent.parent.name == environment
    interpreter = own if mine else ROOT / environment / "bin/python"
    return [str(interpreter), "-I", "-S", str(STUB), _server(interpreter)]


@functools.cache
def _server(interpreter: Path) -> str:
    """Start the server of an interpreter, once in this process; return its socket.

    It ends with this process, by the end of its standard input.
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
    assert process.stdout.readline() == "ready\n", "the server of preloaded ranks does not start"
    return socket
