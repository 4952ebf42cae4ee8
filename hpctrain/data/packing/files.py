"""Files to pack: found below a folder, known again after a kill, read without their packing."""

import gzip
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from hpctrain.core.errors import DataError

_NUM_THREADS = 16
_FILES_PER_TASK = 256


def files_below(folder: Path, left_out: list[str] | None = None) -> Iterator[str]:
    """Find all files below a folder, in the order of their names, a folder's own files first.

    Links are followed, but for those to a folder above, which lead round in circles: they go to
    ``left_out``. What begins with a dot is left out.

    Raises:
        DataError: a link leads to a folder that is below already, or nowhere, or something is
            neither a file nor a folder.
        OSError: a folder cannot be read.
    """
    root = str(folder)
    seen = {_identity(str(above)): root for above in folder.resolve().parents}
    seen[_identity(root)] = root
    waiting = [root]
    while waiting:
        at = waiting.pop()
        inside = []
        with os.scandir(at) as entries:
            visible = (entry for entry in entries if not entry.name.startswith("."))
            found = sorted(visible, key=lambda entry: entry.name)
        for entry in found:
            if entry.is_dir():
                inside.append(entry.path)
                continue
            # The listing tells what is no file, without a call for each of millions.
            if not entry.is_file():
                check_file(entry.path)
            yield entry.path
        waiting += reversed([path for path in inside if _is_new(at, path, seen, left_out)])


def _is_new(
    at: str, path: str, seen: dict[tuple[int, int], str], left_out: list[str] | None
) -> bool:
    """Say whether a folder in ``at`` is to be looked at; it is remembered."""
    before = seen.setdefault(_identity(path), path)
    if before == path:
        return True
    if not f"{at}/".startswith(os.path.join(before, "")):  # noqa: PTH118 - with one slash
        raise DataError(
            f"a folder of samples is packed once, {before} and {path} are the same; remove the "
            f"link"
        )
    if left_out is not None:
        left_out.append(path)
    return False


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)  # noqa: PTH116 - a Path takes too long
    return status.st_dev, status.st_ino


def check_file(name: str) -> None:
    """Check that what is to be read is a file: it alone can be read more than once.

    Raises:
        DataError: it is a pipe, a socket or a device, or a link that leads nowhere.
    """
    path = Path(name)
    if path.is_file():
        return
    if path.is_symlink() and not path.exists():
        raise DataError(
            f"a link among samples leads to a file or a folder, {path} leads to "
            f"{path.readlink()}, which is not there; bring it back, or remove the link"
        )
    raise DataError(
        f"samples are read from files, {path} is a folder, a pipe, a socket or a device; write "
        f"what it gives to a file, or remove it"
    )


def ending_of(text: str) -> str:
    """Return the ending of a file's name in small letters, with its dot."""
    return os.path.splitext(text)[1].lower()  # noqa: PTH122 - as above


def fingerprint(files: Iterable[str]) -> str:
    """Return a text that changes with the name, size or time of any of the files.

    Raises:
        OSError: a file is not there.
    """
    names = list(files)
    pieces = [names[at : at + _FILES_PER_TASK] for at in range(0, len(names), _FILES_PER_TASK)]
    # File systems of clusters take long to answer, but answer many at a time.
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = list(pool.map(_digest, pieces))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        status = os.stat(name)  # noqa: PTH116 - as above
        line = f"{os.path.abspath(name)}\0{status.st_size}\0{status.st_mtime_ns}\0"  # noqa: PTH100
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


@contextmanager
def unpacked(path: str) -> Iterator[IO[bytes]]:
    """Open a file, which gzip may have packed: its first bytes tell.

    All of it that is read agrees with the checksums of gzip.
    """
    with Path(path).open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        yield cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if is_packed else file
