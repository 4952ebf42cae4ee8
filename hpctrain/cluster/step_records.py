"""Records of steps and samples of counters, which each rank writes in a scaling study."""

import atexit
import functools
import os
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path

from hpctrain.core.atomic import explained_writes, make_folder
from hpctrain.core.config import setting
from hpctrain.core.lazy import imported
from hpctrain.core.records import Records

_FLUSH_S = 1.0  # a kill may lose the records of this time; the study repeats a killed run
_PERIOD_S, _FRACTION = 1.0, 0.01  # shortest time between samples; fraction of time for samples


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
        step: index of the step, the same on all ranks.
        samples: number of samples of this rank in the step. None records only ``values``, such as
            the accuracy of a test, and the next step begins now.
        loss: mean over these samples.
        seconds: duration of the step; None for the time since the last call.
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
        self._sampler = _Sampler(self._records)
        atexit.register(self.close)

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

    def close(self) -> None:
        self.flush()
        if os.getpid() == self._pid:
            self._sampler.stop()


class _Sampler:
    """Thread that writes samples of all counters, for at most ``_FRACTION`` of the time."""

    def __init__(self, records: Records) -> None:
        self._records, self._is_over = records, threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpctrain-sampler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        counters = imported("hpctrain.cluster.counters:Counters")()
        with suppress(OSError):  # a full disk is reported by the records of the steps
            while True:
                is_last, start = self._is_over.is_set(), time.monotonic()
                self._records.append(counters.read())
                if is_last:
                    return
                cost_s = time.monotonic() - start
                self._is_over.wait(max(_PERIOD_S, cost_s / _FRACTION))

    def stop(self) -> None:
        """Write a last sample and end the thread."""
        self._is_over.set()
        self._thread.join(_FLUSH_S)


@functools.cache
def _recorder(_pid: int) -> _Recorder | None:  # the argument gives a forked child its own file
    folder = setting("records")
    return None if folder is None else _Recorder(folder)
