"""Records of steps, which a program writes for a scaling study."""

import atexit
import functools
import json
import os
import platform
import time
from pathlib import Path

from hpctrain.core.config import records_folder
from hpctrain.core.errors import ConfigError

_FLUSH_S = 1.0  # what a kill may cost; the study does such a repeat again


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
    def __init__(self, folder: Path) -> None:
        # Ranks need no number: their files tell them apart.
        path = folder / f"{platform.node()}-{os.getpid()}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"HPCTRAIN_RECORDS names a folder for records, {folder} cannot be written: "
                f"{error.strerror}; unset it, or name another"
            ) from None
        self._pid, self._lines, self._flushed = os.getpid(), b"", time.monotonic()
        atexit.register(self.flush)

    def write(self, step: int, values: dict[str, float]) -> None:
        now = time.monotonic()
        self._lines += json.dumps({"step": int(step), "at": now, **values}).encode() + b"\n"
        if now - self._flushed > _FLUSH_S:
            self.flush()
            self._flushed = now

    def flush(self) -> None:
        if os.getpid() == self._pid:  # a forked child has these lines too
            self._file.write(self._lines)
            self._lines = b""


@functools.cache
def _recorder(_pid: int) -> _Recorder | None:  # a forked child begins a file of its own
    folder = records_folder()
    return None if folder is None else _Recorder(folder)
