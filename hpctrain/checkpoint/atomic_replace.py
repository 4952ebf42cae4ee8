"""A directory that appears at once under its name, also where there is one already."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

from hpctrain.core.atomic import PART, sync

_HERE = -100  # AT_FDCWD: paths are as for any other call
_EXCHANGE = 2


def appear(room: Path, directory: Path) -> None:
    """Give a directory its name, and return when that is on disk.

    Args:
        room: the directory, whose contents are on disk; beside ``directory``.
        directory: its name from now on; an older directory of that name is removed, at once
            where the file system can exchange two names. Where it cannot, a kill at the wrong
            instant leaves neither.

    Raises:
        OSError: the file system refuses; the older directory is intact.
    """
    old = room
    try:
        room.rename(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(room, directory):
            old = directory.with_name(f"{directory.name}.old{PART}")
            _in_two_steps(room, directory, old)
    sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names at once; return False where that cannot be done."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    paths = (_HERE, os.fsencode(a), _HERE, os.fsencode(b), ctypes.c_uint(_EXCHANGE))
    return call is not None and call(*paths) == 0


def _in_two_steps(room: Path, directory: Path, old: Path) -> None:
    shutil.rmtree(old, ignore_errors=True)
    directory.rename(old)
    try:
        room.rename(directory)
    except OSError:
        old.rename(directory)
        raise
