"""A lock on the directory of a data set: one writer at a time."""

import fcntl
import os
import platform
from contextlib import suppress
from pathlib import Path

from hpctrain.core.errors import DataError
from hpctrain.core.logs import logger

LOCK = "writer.lock"


class WriterLock:
    """Held by rank 0 of a writer from its start to its end; goes with its process, also by a kill.

    Where a file system has no locks, such as Lustre mounted without ``flock``, writers are not
    kept apart, which a warning says.

    Raises:
        DataError: another writer holds it.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        # Whoever let go has removed the file, and may have done so after it was opened here.
        while not self._take():
            self._file.close()

    def _take(self) -> bool:
        # For reading and writing: NFS gives no exclusive lock else.
        self._file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise DataError(
                f"a data set has one writer at a time, {holder} writes to {self._path.parent}; "
                f"wait for its end, or choose another directory"
            ) from None
        except OSError as error:
            logger.warning(
                "%s has no locks (%s): see to it that nobody else writes there meanwhile",
                self._path.parent,
                error.strerror,
            )
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == os.fstat(self._file.fileno()).st_ino:
                with suppress(OSError):  # a full disk; the lock holds without the words
                    os.ftruncate(self._file.fileno(), 0)
                    text = f"process {os.getpid()} on {platform.node()}"
                    os.write(self._file.fileno(), text.encode())
                return True
        return False

    def close(self) -> None:
        """Let go; harmless the second time."""
        if not self._file.closed:
            with suppress(OSError):
                self._path.unlink()
            self._file.close()
