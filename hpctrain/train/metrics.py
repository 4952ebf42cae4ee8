"""Records of a run, one JSON object per line."""

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hpctrain.files import publishing, sync


class Metrics:
    """Appends records to a file, each at once, so that a killed run has all but the last.

    On ranks that write nothing, ``path`` is None and every call returns at once.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path is not None:
            self._file = path.open("a", encoding="utf-8")
            sync(path.parent)
        self.num_records = 0 if path is None else len(read(path))
        """Records of the file, those of earlier parts of the run included; 0 without a file."""

    def write(self, event: str, **values: Any) -> None:
        """Append one record; a number that is not finite becomes null, as JSON has none."""
        if self._file is None:
            return
        record = {"event": event} | {name: _finite(value) for name, value in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.num_records += 1

    def sync(self) -> None:
        """Return when all records are on disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def cut(path: Path, num_records: int) -> None:
    """Leave the first records of a file, at once or not at all; a missing file stays missing.

    A machine that died may have lost some of them: then those that are there stay.

    Raises:
        OSError: the file system refuses.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").split("\n")[:-1][:num_records]
    with publishing(path) as part:
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; a last line cut short by a kill is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
