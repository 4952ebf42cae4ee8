"""Files of records, one JSON object per line; those of steps, which scaling studies read."""

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

from hpctrain.core.atomic import make_folder, refusal, sync
from hpctrain.core.config import setting
from hpctrain.core.errors import ConfigError
from hpctrain.core.python_compat import Self

_FLUSH_S = 1.0  # of steps a kill may cost so much; the study does such a repeat again


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

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append records; a number that is not finite becomes null, as JSON has none.

        Raises ``OSError``: the file system refuses.
        """
        lines = [json.dumps(finite(each)) + "\n" for each in records]
        # One write, but on a full disk: others who append, or read, meet whole lines.
        text = memoryview("".join(lines).encode())
        while text:
            text = text[self._file.write(text) :]

    def sync(self) -> None:
        """Return when all records are on disk."""
        os.fsync(self._file.fileno())

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


def record(
    *,
    step: int,
    samples: int | None = None,
    loss: float | None = None,
    seconds: float | None = None,
    **values: float,
) -> None:
    """Tell a scaling study of a step that this rank has just done; elsewhere do nothing.

    Every rank calls it at the end of each step. Not collective, and it needs neither MPI nor
    ``init``: each process appends to a file of its own, in the folder that ``hpctrain study run``
    names by ``HPCTRAIN_RECORDS``. A step lasts from one call to the next, and as long as on the
    slowest rank.

    Args:
        step: number of the step, the same on all ranks.
        samples: from which this rank has learnt in it. None is no step: ``values`` alone are told,
            such as the accuracy of a test, and the next step begins now.
        loss: mean over these samples.
        seconds: duration of the step, where that is not the time since the last call.
        **values: ``compute_s``, ``communication_s``, ``input_s``: parts of the step;
            ``node_bytes``, ``rail_bytes``: what this rank has moved in its node and sent in it;
            any other, such as ``accuracy``, is what a study may have as its target.

    Raises:
        ConfigError: the folder cannot be written.
    """
    recorder = _recorder(os.getpid())
    if recorder is not None:
        told = {"samples": samples, "loss": loss, "seconds": seconds, **values}
        recorder.write(step, {n: float(value) for n, value in told.items() if value is not None})


class _Recorder:
    """Appends what a rank tells about once a second: its steps may be short, and the disk far."""

    def __init__(self, folder: Path) -> None:
        self._pid, self._flushed = os.getpid(), time.monotonic()
        self._pending: list[dict[str, float]] = []
        try:
            make_folder(folder)
            # Ranks need no number: their files tell them apart.
            self._records = Records(folder / f"{platform.node()}-{self._pid}.jsonl")
        except OSError as error:
            raise ConfigError(
                f"the folder {folder} of HPCTRAIN_RECORDS cannot be written: "
                f"{refusal(error, 'name another one, or unset it')}"
            ) from None
        atexit.register(self.flush)

    def write(self, step: int, values: dict[str, float]) -> None:
        now = time.monotonic()
        self._pending.append({"step": int(step), "at": now, **values})
        if now - self._flushed > _FLUSH_S:
            self.flush()
            self._flushed = now

    def flush(self) -> None:
        if os.getpid() == self._pid:  # a forked child has these lines too
            self._records.append(*self._pending)
            self._pending.clear()


@functools.cache
def _recorder(_pid: int) -> _Recorder | None:  # a forked child begins a file of its own
    folder = setting("records")
    return None if folder is None else _Recorder(folder)


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with None in place of numbers that are not finite, as JSON has none."""
    return {name: _finite(value) for name, value in record.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return finite(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
