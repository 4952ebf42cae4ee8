"""What a cluster has of this machine for itself, until its owner ends, however it ends."""

import contextlib
import errno
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

BLOCK = 64
"""Ports of a cluster: the controller's and one for each node."""

RANGE = range(15000, 32000 - BLOCK, BLOCK)
"""Below the ports that the kernel hands out."""

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
"""Waits until its standard input closes, which the end of its owner does."""


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Make a directory in /tmp: paths of sockets have at most 107 letters."""
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
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


@contextlib.contextmanager
def ports() -> Iterator[int]:
    """Claim a block of free ports, and give the first.

    Raises:
        RuntimeError: there is none.
    """
    for first in random.Random().sample(RANGE, len(RANGE)):
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                # An abstract name is free again the moment its owner ends.
                claim.bind(f"\0hpctrain-slurm-{first}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            if all(_is_free(first + k) for k in range(BLOCK)):
                yield first
                return
    raise RuntimeError(f"{BLOCK} free ports in a row are needed, found none in {RANGE}")


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
