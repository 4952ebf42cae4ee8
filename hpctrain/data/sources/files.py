"""Files below a folder: millions of them, kept as text."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import overload

_NUM_THREADS = 16
_FILES_PER_TASK = 256


class Paths(Sequence[Path]):
    """Paths that are made when they are asked for: a Path takes several times its text."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Keep the texts."""
        self.texts = texts

    def __len__(self) -> int:
        """Return the number of paths."""
        return len(self.texts)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> "Paths": ...
    def __getitem__(self, index: int | slice) -> "Path | Paths":
        """Return a path, or some of them."""
        if isinstance(index, slice):
            return Paths(self.texts[index])
        return Path(self.texts[index])


def files_below(folder: Path) -> Iterator[str]:
    """Find all files below a folder, in the order of their names, a folder's own files first.

    What begins with a dot is left out.
    """
    for at, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield os.path.join(at, name)  # noqa: PTH118 - a Path for each takes too long


def ending_of(text: str) -> str:
    """Return the ending of a file's name in small letters, with its dot."""
    return os.path.splitext(text)[1].lower()  # noqa: PTH122 - as above


def fingerprint(files: Iterable[Path]) -> str:
    """Return a text that changes with the name, size or time of any of the files.

    Raises:
        OSError: a file is not there.
    """
    paths = list(map(str, files))
    pieces = [paths[at : at + _FILES_PER_TASK] for at in range(0, len(paths), _FILES_PER_TASK)]
    # File systems of clusters take long to answer, but answer many at a time.
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = list(pool.map(_digest, pieces))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(paths: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        status = os.stat(path)  # noqa: PTH116 - as above
        line = f"{os.path.abspath(path)}\0{status.st_size}\0{status.st_mtime_ns}\0"  # noqa: PTH100
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()
