"""Folder on a node that exists as long as a process of the job holds a lock on it."""

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.cluster.env import scratch_folders
from hpctrain.cluster.resources import available_bytes
from hpctrain.core.config import Settings
from hpctrain.core.libc import file_system_magic
from hpctrain.core.paths import absolute
from hpctrain.core.python_compat import Self

MEMORY = Path("/dev") / "shm"  # folder in the memory of the node
PREFIX = "hpctrain-"
LOCK = "lock"

_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)
"""Magic numbers of tmpfs and ramfs, as in statfs(2)."""
_LOCAL_FILE_SYSTEMS = (0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0x794C7630)
"""Magic numbers of file systems on a disk: ext2-4, xfs, btrfs, f2fs, zfs and overlayfs."""
_FREE_SHARE = 0.95  # usable fraction of the free space of a disk, or of the user's folder
_MEMORY_SHARE = 0.5  # usable fraction of the free memory, because the ranks need memory too


class Site(NamedTuple):
    """A folder of this node, and the number of bytes that may be written to it."""

    folder: Path
    room_bytes: int


def sites(to: Path | str, source: Path) -> list[Site]:
    """Return the folders of this node that can store copies of data, in order of preference.

    If ``to`` is a path, only this folder is returned. If ``to`` is ``auto``, the folders are
    HPCTRAIN_STAGE_DIR if set, the job's folders for temporary files, and a folder in the memory of
    the node. Folders of the last two kinds are omitted if they are not on a disk or in the memory
    of this node, or if they are on the file system of ``source``. ``to`` or HPCTRAIN_STAGE_DIR is
    created if missing. Raises ``OSError``: the folder cannot be created.
    """
    found = []
    chosen = Settings.from_env().stage_dir if to == "auto" else absolute(to)
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        found.append(Site(chosen, _room(chosen, _FREE_SHARE)))
    for folder in (*scratch_folders(), MEMORY) if to == "auto" else ():
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            continue
        is_memory = _magic(folder) in _MEMORY_FILE_SYSTEMS
        is_local = is_memory or _magic(folder) in _LOCAL_FILE_SYSTEMS
        if is_local and folder.stat().st_dev != source.stat().st_dev:
            share = _MEMORY_SHARE if is_memory else _FREE_SHARE
            found.append(Site(folder, _room(folder, share)))
    return found


class NodeFolder:
    """Lock of one process on a folder; the last process to release its lock removes the folder.

    A process releases the lock at its end, or when this object is deleted. If all processes are
    killed, the ``sweep`` of a later job removes the folder.

    ``create`` and ``join`` call the constructor, which takes ownership of the descriptor ``lock``.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._end = weakref.finalize(self, _release, path, lock, os.getpid())

    @classmethod
    def create(cls, parent: Path, label: str) -> Self:
        """Create and lock a folder in ``parent``; ``label`` is part of its name.

        Raises ``OSError``: the folder cannot be created, or its file system has no locks.
        """
        new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{label}-", dir=parent))
        try:
            lock = _locked(new / LOCK, os.O_CREAT)
            # The folder is locked before it is renamed, so no process finds it unlocked.
            path = new.rename(new.with_name(new.name.removeprefix(".")))
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            raise
        return cls(path, lock)

    @classmethod
    def join(cls, path: Path) -> Self:
        """Lock a folder that another process has locked.

        Raises:
            OSError: this process cannot open the lock file.
        """
        return cls(path, _locked(path / LOCK))

    def close(self) -> None:
        """Release the lock; the last process removes the folder. Idempotent."""
        self._end()

    def __reduce__(self) -> Any:
        """Raise ``TypeError``: a copy in another process would not hold the lock."""
        raise TypeError(
            f"a NodeFolder must stay in the process that locked it, but process "
            f"{os.getpid()} pickles or copies it; call NodeFolder.join(path) in the other process"
        )


def sweep(parent: Path) -> list[Path]:
    """Remove this user's folders in ``parent`` whose processes have all ended.

    Returns the removed folders. Several processes may call this concurrently.
    """
    removed = []
    with suppress(OSError):
        for path in sorted(parent.glob(f"{PREFIX}*")):
            with suppress(OSError):
                if path.stat().st_uid != os.getuid():
                    continue
                # Skips a folder without a lock file, which another program made, and a folder in
                # use, whose lock is held.
                with (path / LOCK).open("r+b") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _locked(path: Path, flags: int = 0) -> int:
    # NFS grants exclusive locks only on descriptors that are open for writing.
    lock = os.open(path, os.O_RDWR | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:
        os.close(lock)
        raise
    return lock


def _release(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child shares the lock and must not release it
        return
    with suppress(BlockingIOError):  # raised while other processes hold the lock
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _magic(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return file_system_magic(descriptor)
    finally:
        os.close(descriptor)


def _room(folder: Path, share: float) -> int:
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    left_bytes = available_bytes() if _magic(folder) in _MEMORY_FILE_SYSTEMS else None
    return int((free_bytes if left_bytes is None else min(free_bytes, left_bytes)) * share)
