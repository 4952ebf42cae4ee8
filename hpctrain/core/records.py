"""Files of records, one JSON object per line."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.core.atomic import sync
from hpctrain.core.python_compat import Self


class Records:
    """Append-only file of records; each record is written immediately.

    A killed process loses at most the last record.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file; add a newline if a killed process left an incomplete line.

        Raises ``OSError`` if the file system reports an error.
        """
        self.path = path
        self._file = path.open("ab", buffering=0)
        if self._file.tell() and not _ends_a_line(path):
            self._file.write(b"\n")
        sync(path.parent)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append records; NaN and infinity become null, because JSON cannot represent them.

        Raises ``OSError`` if the file system reports an error.
        """
        lines = [json.dumps(finite(each)) + "\n" for each in records]
        # Unless the disk is full, one write is sufficient, so that other processes see only
        # complete lines.
        text = memoryview("".join(lines).encode())
        while text:
            text = text[self._file.write(text) :]

    def sync(self) -> None:
        """Write all records to disk by ``fsync(2)``."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path, key: str = "event") -> list[dict[str, Any]]:
    """Read a file and return its complete records that contain ``key``.

    Lines that are not records, and an incomplete last line, are omitted.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    return [record for line in lines if (record := record_of(line, key)) is not None]


def record_of(line: bytes, key: str = "event") -> dict[str, Any] | None:
    """Parse a line; return None if the line is not a JSON object that contains ``key``."""
    try:
        found = json.loads(line)
    except ValueError:  # the line is not JSON, or its bytes are not text
        return None
    return found if isinstance(found, dict) and key in found else None


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with None instead of NaN and infinity, which JSON cannot represent."""
    return {name: _finite(value) for name, value in record.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return finite(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
