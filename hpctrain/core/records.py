"""Files of records, one JSON object per line, and the records of steps for scaling studies."""

import atexit
import functools
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.core.atomic import explained_writes, make_folder, sync
from hpctrain.core.config import setting
from hpctrain.core.python_compat import Self

_FLUSH_S = 1.0  # records of this time may be lost by a kill; the study repeats such a run


class Records:
    """File of records to which each record is appended immediately.

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
        # One write unless the disk is full: other writers and readers see complete lines.
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
    """Return the complete records of a file that have ``key``.

    Lines that are not records, and an incomplete last line, are omitted.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    return [record for line in lines if (record := record_of(line, key)) is not None]


def record_of(line: bytes, key: str = "event") -> dict[str, Any] | None:
    """Return the record of a line; None if the line is not a record."""
    try:
        found = json.loads(line)
    except ValueError:  # the line is not JSON, or its bytes are not text
        return None
    return found if isinstance(found, dict) and key in found else None


def record(
    *,
    step: int,
    samples: int | None = None,
    loss: float | None = None,
    seconds: float | None = None,
    **values: float,
) -> None:
    """Record a finished step for a scaling study; a no-op outside of a study.

    Every rank calls this function at the end of each step. Not collective, and needs neither MPI
    nor ``init``: each process appends to its own file, in the folder ``HPCTRAIN_RECORDS``, which
    ``hpctrain study run`` sets. A step lasts from one call to the next, on the slowest rank.

    Args:
        step: number of the step, the same on all ranks.
        samples: number of samples of this rank in the step. None records only ``values``, such as
            the accuracy of a test, and the next step begins now.
        loss: mean over these samples.
        seconds: duration of the step, if that is not the time since the last call.
        **values: ``compute_s``, ``communication_s``, ``input_s``: parts of the step in seconds;
            ``node_bytes``, ``rail_bytes``: bytes that this rank has moved inside its node and sent
            between nodes; any other, such as ``accuracy``, can be the target of a study.

    Raises:
        ConfigError: the folder is not writable.
    """
    recorder = _recorder(os.getpid())
    if recorder is not None:
        given = {"samples": samples, "loss": loss, "seconds": seconds, **values}
        recorder.write(step, {n: float(value) for n, value in given.items() if value is not None})


class _Recorder:
    """Writes the records of a rank to a file about once per second.

    File systems may be slow, so a step does not wait for a write.
    """

    def __init__(self, folder: Path) -> None:
        self._pid, self._flushed = os.getpid(), time.monotonic()
        self._pending: list[dict[str, float]] = []
        elsewhere = "name another folder, or unset HPCTRAIN_RECORDS"
        with explained_writes("the folder of HPCTRAIN_RECORDS", folder, elsewhere):
            make_folder(folder)
            # Host and process id distinguish the files: the rank may be unknown.
            self._records = Records(folder / f"{platform.node()}-{self._pid}.jsonl")
        atexit.register(self.flush)

    def write(self, step: int, values: dict[str, float]) -> None:
        now = time.monotonic()
        self._pending.append({"step": int(step), "at": now, **values})
        if now - self._flushed > _FLUSH_S:
            self.flush()
            self._flushed = now

    def flush(self) -> None:
        if os.getpid() == self._pid:  # a forked child has a copy of these records
            self._records.append(*self._pending)
            self._pending.clear()


@functools.cache
def _recorder(_pid: int) -> _Recorder | None:  # the argument gives a forked child its own file
    folder = setting("records")
    return None if folder is None else _Recorder(folder)


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
