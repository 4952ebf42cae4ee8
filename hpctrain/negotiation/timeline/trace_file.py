"""A file of trace events that is whole JSON whenever nobody is writing to it."""

import os
from collections.abc import Sequence
from pathlib import Path

_END = b"\n]\n"


class TraceFile:
    """An array of events in Chrome's trace format, which Perfetto opens too.

    What follows the last event is written anew with every batch of events: a process that is
    killed leaves a file that any JSON reader takes.
    """

    def __init__(self, path: Path) -> None:
        """Make the file, or empty it.

        Raises:
            OSError: it cannot be written.
        """
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._num_bytes = 0

    def append(self, events: Sequence[str]) -> None:
        """Write some events, each a JSON object.

        Raises:
            OSError: the disk is full, or the like; what was there before is whole.
        """
        if not events:
            return
        text = (",\n" if self._num_bytes else "[\n") + ",\n".join(events)
        data = text.encode()
        try:
            self._write(data + _END)
        except OSError:
            os.ftruncate(self._file, self._num_bytes)
            self._write(_END if self._num_bytes else b"")
            raise
        self._num_bytes += len(data)

    def _write(self, data: bytes) -> None:
        """Write behind the last event."""
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written:], self._num_bytes + written)

    def close(self) -> None:
        """Write nothing more."""
        os.close(self._file)
