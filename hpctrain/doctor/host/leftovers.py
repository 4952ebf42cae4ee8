"""Files in the memory of the node that outlived the processes that used them."""

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hpctrain.doctor.checks.facts import Leftover
from hpctrain.doctor.checks.memory import MAKERS

YOUNG_S = 60.0
"""A file this young may belong to ranks that are just starting."""


def leftovers(folder: Path, proc: Path = Path("/proc")) -> tuple[Leftover, ...]:
    """List what nobody uses any more of what this user may remove.

    A file counts as used while a process maps it or has it open, a folder of ours while a process
    holds its lock. Processes of other containers with the same folder are not seen.
    """
    candidates = [(path, maker) for path, maker in _of_makers(folder) if _is_old_and_mine(path)]
    if not candidates:
        return ()
    used = _used(folder, proc)
    return tuple(
        Leftover(path=path, num_bytes=_num_bytes(path), maker=maker)
        for path, maker in sorted(candidates)
        if not (_is_locked(path) if path.is_dir() else str(path) in used)
    )


def _of_makers(folder: Path) -> Iterator[tuple[Path, str]]:
    for pattern, maker in MAKERS.items():
        for path in folder.glob(pattern):
            yield path, maker


def _is_old_and_mine(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:  # gone meanwhile
        return False
    is_mine = os.geteuid() in (0, status.st_uid)
    return is_mine and time.time() - status.st_mtime > YOUNG_S


def _used(folder: Path, proc: Path) -> set[str]:
    """The files in ``folder`` that a process which we may look at maps or has open."""
    start = f"{folder}/"
    found: set[str] = set()
    for process in proc.glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text(errors="replace").splitlines()
            links = [os.readlink(link) for link in (process / "fd").iterdir()]  # noqa: PTH115
        except OSError:  # another user's, or ended
            continue
        found.update(line[line.index(start) :] for line in lines if f" {start}" in line)
        found.update(link for link in links if link.startswith(start))
    return found


def _is_locked(path: Path) -> bool:
    """Say whether a process holds the lock of a folder; one without a lock is left alone."""
    try:
        lock = os.open(path / "lock", os.O_RDWR)  # NFS asks for it
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _num_bytes(path: Path) -> int:
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    total = 0
    for file in files:
        try:
            total += file.lstat().st_blocks * 512
        except OSError:
            continue
    return total
