"""Room for a data set on a node: folders that are its own, and their capacity."""

import os
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.memory import available_bytes
from hpctrain.core import config
from hpctrain.core.config import Settings

MEMORY = Path("/dev/shm")  # noqa: S108 - the memory of the node, as a folder

_IN_MEMORY = {"tmpfs", "ramfs"}
_ON_DISK = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "overlay"}
_FREE_SHARE = 0.95
"""Of a disk or memory that the user chose; others write there too."""
_MEMORY_SHARE = 0.5
"""Of free memory that the user did not choose: the ranks need the rest."""


@dataclass(frozen=True, slots=True)
class Site:
    """A folder of this node, and how many bytes may be put there."""

    folder: Path
    room_bytes: int


def folders(to: Path | str) -> list[Path]:
    """Return the folders to look at, best first: the given one, or for ``auto`` some.

    These are HPCTRAIN_STAGE_DIR, then the job's folder for temporary files on this node, then the
    memory of the node.
    """
    if to != "auto":
        return [Path(to)]
    chosen = Settings.from_env().stage_dir
    return [*([chosen] if chosen else []), *config.scratch_folders(), MEMORY]


def sites(to: Path | str, source: Path) -> list[Site]:
    """Return the folders that are worth copying to, best first.

    What the user named is taken as it is, and made if missing. Of the others, a folder counts if
    it is on a file system of this node and not on the one where the data set is.

    Args:
        to: a folder, or ``auto``.
        source: directory of the data set.

    Raises:
        OSError: the folder that the user named cannot be made.
    """
    chosen = Settings.from_env().stage_dir if to == "auto" else Path(to)
    found = []
    for folder in folders(to):
        if folder == chosen:
            folder.mkdir(parents=True, exist_ok=True)
            found.append(Site(folder, _room(folder, _FREE_SHARE)))
        elif _is_local(folder) and folder.stat().st_dev != source.stat().st_dev:
            share = _MEMORY_SHARE if filesystem_of(folder) in _IN_MEMORY else _FREE_SHARE
            found.append(Site(folder, _room(folder, share)))
    return found


def filesystem_of(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the kind of file system that a path lies on, such as ``ext4``; empty if unknown."""
    path, best, kind = path.resolve(), Path(), ""
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, rest = line.partition(" - ")
        point = Path(_unescaped(mount.split()[4]))
        # A later mount hides an earlier one on the same point.
        if path.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, rest.split()[0]
    return kind


def _is_local(folder: Path) -> bool:
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return False
    return filesystem_of(folder) in _IN_MEMORY | _ON_DISK


def _room(folder: Path, share: float) -> int:
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if filesystem_of(folder) in _IN_MEMORY:
        left_bytes = available_bytes()
        free_bytes = free_bytes if left_bytes is None else min(free_bytes, left_bytes)
    return int(free_bytes * share)


def _unescaped(text: str) -> str:
    """Undo the octal escapes of the kernel, which writes a space as 040 behind a backslash."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text
