"""Files of records, one JSON object per line, each appended at once."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from hpctrain.core.atomic import sync


class Records:
    """Appends records to a file, each at once, so that who is killed has all but the last."""

    def __init__(self, path: Path) -> None:
        """Open the file, which is made if missing; a last line cut short by a kill is ended.

        Raises ``OSError``: the file system refuses.
        """
        self.path = path
        self._file = path.open("ab", buffering=0)
        if self._file.tell() and not _ends_a_line(path):
            self._file.write(b"\n")
        sync(path.parent)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record; a number that is not finite becomes null, as JSON has none.

        Raises ``OSError``: the file system refuses.
        """
        text = json.dumps({name: _finite(value) for name, value in record.items()})
        # One write, but on a full disk: others who append, or read, meet whole lines.
        line = memoryview(text.encode() + b"\n")
        while line:
            line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Return when all records are on disk."""
        os.fsync(self._file.fileno())

    def fileno(self) -> int:
        """Return the descriptor of the file, such as for a lock."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path, key: str = "event") -> list[dict[str, Any]]:
    """Return the whole records of a file: those that have ``key``.

    A last line cut short by a kill is left out, and so is every line that is no record.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    return [record for line in lines if (record := record_of(line, key)) is not None]


def record_of(line: bytes, key: str = "event") -> dict[str, Any] | None:
    """Return what a line says; None where that is no record."""
    try:
        found = json.loads(line)
    except ValueError:  # among them bytes that are no text
        return None
    return found if isinstance(found, dict) and key in found else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
