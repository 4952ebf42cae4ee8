"""The file under HDF5 while a shard is written: what the system refuses is told by us."""

import io
import os
from pathlib import Path
from typing import Any


class PartFile(io.RawIOBase):
    """A file that takes every byte; after a refusal it keeps none, and ``check`` tells why.

    HDF5 keeps what it could not write, tries again when it closes and when the program ends, and
    crashes there (seen with 2.0). So it never learns of a refusal.
    """

    def __init__(self, path: Path, mode: str) -> None:
        """Open a file: ``w+b`` makes a new one, ``r+b`` changes one.

        Raises:
            OSError: the file system refuses.
        """
        super().__init__()
        self._file = path.open(mode, buffering=0)
        self._position = 0
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise what the system, or a signal, has said since the file was opened."""
        if self._error is not None:
            raise self._error

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def writable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a byte; the end is where the system says it is."""
        if whence == os.SEEK_END:
            offset += os.fstat(self._file.fileno()).st_size
        elif whence == os.SEEK_CUR:
            offset += self._position
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        """Read; zeros where nothing was written."""
        view = memoryview(buffer).cast("B")
        data = os.pread(self._file.fileno(), len(view), self._position)
        view[: len(data)] = data
        view[len(data) :] = bytes(len(view) - len(data))
        self._position += len(view)
        return len(view)

    def write(self, data: Any) -> int:
        """Write all of it, or keep the reason for ``check``."""
        view = memoryview(data).cast("B")
        start = self._position
        self._position += len(view)
        if self._error is None:
            try:
                done = 0
                while done < len(view):
                    done += os.pwrite(self._file.fileno(), view[done:], start + done)
            except BaseException as error:
                self._error = error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size, or keep the reason for ``check``."""
        size = self._position if size is None else size
        if self._error is None:
            try:
                os.ftruncate(self._file.fileno(), size)
            except BaseException as error:
                self._error = error
        return size

    def close(self) -> None:
        """Give the file back to the system."""
        self._file.close()
        super().close()
