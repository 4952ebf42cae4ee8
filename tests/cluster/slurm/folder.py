"""The directory of a cluster, gone when its owner is."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

LONGEST = 60
"""Letters of its path: that of a UNIX socket has at most 107."""

BROOM = """
import shutil, sys, time
from pathlib import Path
sys.stdin.read()
directory = Path(sys.argv[1])
for _ in range(100):  # daemons that are about to end may still write
    shutil.rmtree(directory, ignore_errors=True)
    if not directory.exists():
        break
    time.sleep(0.05)
"""
"""Waits until its standard input closes, which the end of its owner does, however it ends."""


@contextlib.contextmanager
def folder(given: Path | None) -> Iterator[Path]:
    """Make the directory and remove it at the end, also when this process is killed.

    Args:
        given: the one to make; by default a new one in /tmp.

    Raises:
        RuntimeError: its path is too long.
        FileExistsError: it is there.
    """
    if given is not None and len(str(given)) > LONGEST:
        raise RuntimeError(
            f"the directory of a cluster has at most {LONGEST} letters, or paths of sockets "
            f"would not fit; {given} has {len(str(given))}"
        )
    if given is None:
        directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    else:
        directory = given
        directory.mkdir(parents=True)
    broom = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BROOM, str(directory)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        directory.chmod(0o755)  # munged wants to be reached by all users
        yield directory
    finally:
        broom.communicate()
