"""Writes of files and directories that are atomic even if the machine stops during a write."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from hpctrain.core.checksum import crc32
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.core.libc import exchange_names
from hpctrain.core.units import MIB

PART = ".part"  # suffix of a file that is being written; if the writer has died, it may be removed


@contextmanager
def publishing(path: Path, name: str = "") -> Iterator[Path]:
    """Yield a path for a temporary file; after the block, rename the file to ``path`` atomically.

    The temporary file is named ``name`` followed by ``PART``; by default, ``name`` is the name of
    ``path``. Concurrent writers need different names.

    If the block succeeds, ``path`` is the new file, which is on disk. If the block raises,
    ``path`` is unchanged and the temporary file is removed. If the process is killed, ``path`` is
    either the old or the new file. Raises ``OSError`` if the file system reports an error.
    """
    part = path.with_name((name or path.name) + PART)
    try:
        yield part
        sync(part)
        part.replace(path)
    except BaseException:
        # A full or read-only disk may also refuse ``unlink``; only the first error is raised.
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def appear(room: Path, directory: Path) -> None:
    """Rename the directory ``room`` to ``directory``, and return when the new name is on disk.

    Args:
        room: existing directory, in the same parent directory as ``directory``; its contents are
            on disk.
        directory: the new name. An older directory of that name is replaced atomically if the file
            system can exchange two names. Otherwise two renames replace the older directory; if
            the process is killed between the renames, no directory has that name.

    Raises:
        OSError: the file system reports an error; the older directory is unchanged.
    """
    old = room
    try:
        room.rename(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not exchange_names(room, directory):
            old = directory.with_name(f"{directory.name}.old{PART}")
            _in_two_steps(room, directory, old)
    sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def _in_two_steps(room: Path, directory: Path, old: Path) -> None:
    shutil.rmtree(old, ignore_errors=True)
    directory.rename(old)
    try:
        room.rename(directory)
    except OSError:
        old.rename(directory)
        raise


_GONE = ".gone."  # part of the name of a directory that is being removed


def doomed(path: Path) -> Path:
    """Return an unused path, to which ``discard`` renames a directory before its removal."""
    return path.with_name(f"{path.name.removesuffix(PART)}{_GONE}{token_hex(4)}{PART}")


def discard(path: Path) -> None:
    """Remove a directory whose name ends with ``PART``; any process may have created it.

    The directory is renamed first. A process that is still writing files to the directory then
    fails, instead of publishing an incomplete directory. Raises ``OSError`` if the file system
    reports an error.
    """
    if _GONE not in path.name:
        path = path.rename(doomed(path))
    shutil.rmtree(path)


def make_folder(path: Path) -> None:
    """Create a directory and its missing parents; return when their names are on disk.

    Raises ``OSError`` if the file system reports an error.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    for folder in missing:
        sync(folder.parent)


def sync(path: Path) -> None:
    """Write a file, or the names in a directory, to disk by ``fsync(2)``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason_of(error: BaseException) -> str:
    """Return a system error as one line, without the text that libraries add."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error).partition("\n")[0]


_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "delete files there, or request a larger quota",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EACCES: "get the permission to write there",
    errno.EPERM: "get the permission to write there",
}
"""For each errno, a remedy with which the same path can be written."""


def refusal(error: BaseException, elsewhere: str) -> str:
    """Return the reason why a write failed, and the remedies, as one text.

    Args:
        error: system error, or an error of a library that was caused by a system error.
        elsewhere: remedy that selects another path.
    """
    cause: BaseException | None = error
    while cause and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    number = cause.errno if isinstance(cause, OSError) else None
    if cause is None and (found := re.search(r"\(os error (\d+)\)", str(error))):  # safetensors
        number = int(found[1])
    remedy = _REMEDIES.get(number or 0)
    reason = os.strerror(number) if number else reason_of(cause or error) or type(error).__name__
    return f"{reason}; {f'{remedy}, or ' if remedy else ''}{elsewhere}"


@contextmanager
def explained_writes(
    what: str, path: Path | str, elsewhere: str, kind: type[HpctrainError] = ConfigError
) -> Iterator[None]:
    """Convert an ``OSError`` inside the block into an error with a remedy.

    Args:
        what: description of the file or folder that the block writes.
        path: path of this file or folder.
        elsewhere: remedy that selects another path.
        kind: class of the new error.
    """
    try:
        yield
    except OSError as error:
        raise kind(
            f"{what} must be writable, but {path} cannot be written: {refusal(error, elsewhere)}"
        ) from error


def crc32_of(path: Path) -> int:
    """Return the crc32 of all bytes of a file."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(4 * MIB):
            crc = crc32(piece, crc)
    return crc


def write_new(path: Path, text: str) -> None:
    """Write a new file. Raises ``ConfigError``: the file exists, or cannot be written."""
    with explained_writes("a new file", path, "name another file"):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"{path} exists and is not replaced; choose another name") from None
