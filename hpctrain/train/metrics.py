"""Records of a run, one JSON object per line; beside them the last times of each rank."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from hpctrain.core.atomic import PART, publishing, sync
from hpctrain.core.errors import ConfigError
from hpctrain.core.logs import logger

SHOWN = 5  # damaged lines that a warning names
RANKS = "ranks.json"  # the last times of each rank, beside the records
RANKS_EVERY_S = 1.0
"""At most so often they are written: a thousand ranks fill 60 kB."""


class Metrics:
    """Appends records to a file, each at once, so that a killed run has all but the last.

    On ranks that write nothing, ``path`` is None and every call returns at once.
    """

    def __init__(self, path: Path | None, may_write: Callable[[], bool] = lambda: True) -> None:
        """Open the file, which is made if missing.

        ``may_write`` is asked before each record; one that may not be written is left out, and
        whoever has asked for it learns elsewhere why.
        """
        self._may_write = may_write
        self._file = None
        if path is not None:
            self._file = path.open("a", encoding="utf-8")
            sync(path.parent)
        self.num_records = 0 if path is None else len(read(path))
        """Records of the file, those of earlier parts of the run included; 0 without a file."""
        self._ranks = None if path is None else path.with_name(RANKS)
        self._of_ranks: dict[str, Any] = {}
        self._ranks_at = -math.inf

    def write(self, event: str, **values: Any) -> None:
        """Append one record; a number that is not finite becomes null, as JSON has none.

        Raises ``ConfigError``: the file system refuses.
        """
        if self._file is None or not self._may_write():
            return
        record = {"event": event} | {name: _finite(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"records of a run go to a file that takes them, and {self._file.name} does not: "
                f"{error.strerror}; make room there, and go on with --resume"
            ) from error
        self.num_records += 1

    def write_ranks(self, step: int, times: Mapping[str, list[float]]) -> None:
        """Replace the times of each rank, for who watches the run; all of them are lists by rank.

        At most every ``RANKS_EVERY_S``, and when the file is closed. Whether a disk takes them
        decides nothing: it is the records that a run needs.
        """
        self._of_ranks = {"step": step, **times}
        if time.monotonic() - self._ranks_at >= RANKS_EVERY_S:
            self._flush_ranks()

    def _flush_ranks(self) -> None:
        if self._ranks is None or not self._of_ranks or not self._may_write():
            return
        part = self._ranks.with_name(self._ranks.name + PART)
        with suppress(OSError):  # at once, but not on disk: nobody goes on from it
            part.write_text(json.dumps(self._of_ranks) + "\n")
            part.replace(self._ranks)
        self._of_ranks, self._ranks_at = {}, time.monotonic()

    def sync(self) -> None:
        """Return when all records are on disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._flush_ranks()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cut(path: Path, num_records: int, step: int) -> None:
    """Leave the first whole records of a file, at once or not at all; a missing file stays away.

    Of the first ``num_records`` lines those stay that are not of later steps than ``step``. A
    machine that died may have lost some of them, or left zeros in their place: then those that are
    there stay, and a warning names the lines that are none. Raises ``OSError``: the file system
    refuses.
    """
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")[:-1]
    records = [record_of(line) for line in lines]
    if damaged := [str(number) for number, record in enumerate(records, 1) if record is None]:
        logger.warning(
            f"{len(damaged)} of {len(lines)} lines of {path} are no records, as after a loss of "
            f"power: {', '.join(damaged[:SHOWN])}{', ...' if len(damaged) > SHOWN else ''}; they "
            f"are left out, and the run goes on"
        )
    # Where line breaks were lost too, a line of a later step stands among the first.
    kept = [
        line
        for line, record in zip(lines[:num_records], records[:num_records], strict=True)
        if record is not None and record.get("step", 0) <= step
    ]
    with publishing(path) as part:
        part.write_bytes(b"".join(line + b"\n" for line in kept))


def read(path: Path) -> list[dict[str, Any]]:
    """Return the whole records of a file.

    A last line cut short by a kill is left out, and so is every line that is no record.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    return [record for record in map(record_of, lines) if record is not None]


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return what a line says; None where that is no record."""
    try:
        found = json.loads(line)
    except ValueError:  # among them bytes that are no text
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None


def result(record: Mapping[str, Any]) -> str:
    """Say for people what the last test of a finished run has given; null is not finite."""
    metric = record["metric"]
    return f"test {record['metric_name']} {math.nan if metric is None else metric:.4f}"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
