"""A directory on one node that lives as long as a process of the job holds its lock."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from hpctrain.core.atomic import PART

PREFIX = "hpctrain-"
LOCK = "lock"

YOUNG_S = 3600.0
"""A directory without a lock is left alone for so long: it may be about to get one."""

END_S = 5.0
"""How long the process that waits for the lock may take to end once it has it."""

_KEEPER = """
import fcntl, os, shutil, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
lock = os.open(sys.argv[1] + "/" + sys.argv[2], os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class StageDirectory:
    """One process's hold of the directory; whoever lets go last removes it.

    Each process lets go at its end, or when nothing refers to this any more. A sleeping process
    in a session of its own waits for the lock as well, so the directory also goes when all ranks
    are killed. What outlives even that is removed by ``sweep``.
    """

    def __init__(
        self, path: Path, lock: int, keeper: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        """Take over the descriptor of a locked lock file; ``create`` and ``join`` make one."""
        self.path = path
        self._end = weakref.finalize(self, _let_go, path, lock, os.getpid(), keeper)

    @classmethod
    def create(cls, parent: Path, label: str) -> Self:
        """Make a directory and hold it.

        Args:
            parent: exists.
            label: part of its name, for people.

        Raises:
            OSError: it cannot be made there, or its file system has no locks.
        """
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{label}-", dir=parent))
        try:
            # Locked before it has its name: nobody can find it unlocked.
            part = path / (LOCK + PART)
            lock = _locked(part, os.O_CREAT)
            part.rename(path / LOCK)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        keeper = None
        with suppress(OSError):  # without one, the next job sweeps
            keeper = _keep(path)
        return cls(path, lock, keeper)

    @classmethod
    def join(cls, path: Path) -> Self:
        """Hold a directory that another process holds.

        Raises:
            OSError: it cannot be seen from here.
        """
        return cls(path, _locked(path / LOCK))

    def close(self) -> None:
        """Let go; the last process removes the directory. Harmless the second time."""
        self._end()

    def __reduce__(self) -> Any:
        """Refuse: a copy in another process would hold nothing."""
        raise TypeError("a StageDirectory belongs to one process")


def sweep(parent: Path) -> list[Path]:
    """Remove the directories of this user whose processes are all gone; return what was removed.

    Several processes may do so at once.
    """
    removed = []
    with suppress(OSError):
        for path in sorted(parent.glob(f"{PREFIX}*")):
            with suppress(OSError):
                if path.is_dir() and path.stat().st_uid == os.getuid() and _is_stale(path):
                    shutil.rmtree(path, ignore_errors=True)
                    removed.append(path)
    return removed


def _is_stale(path: Path) -> bool:
    try:
        lock = os.open(path / LOCK, os.O_RDWR)
    except FileNotFoundError:
        # Ours, and killed just after it was made; or nothing that we know.
        return (path / (LOCK + PART)).exists() and time.time() - path.stat().st_mtime > YOUNG_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _locked(path: Path, flags: int = 0) -> int:
    # NFS gives a lock for this process alone to who may write, so nobody opens it read-only.
    lock = os.open(path, os.O_RDWR | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:
        os.close(lock)
        raise
    return lock


def _let_go(path: Path, lock: int, owner: int, keeper: "subprocess.Popen[bytes] | None") -> None:
    if os.getpid() != owner:  # a forked child shares the lock and must not give it up
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)  # others still read
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
    if keeper is not None:
        with suppress(subprocess.TimeoutExpired):
            keeper.wait(END_S)


def _keep(path: Path) -> "subprocess.Popen[bytes]":
    """Start the process that outlives the job."""
    return subprocess.Popen(  # noqa: S603 - our own interpreter
        [sys.executable, "-I", "-S", "-c", _KEEPER, str(path), LOCK],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what kills the ranks must not kill it
    )
