"""Records of a run, one JSON object per line, and the latest times of each rank."""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.atomic import PART, explained_writes, publishing
from hpctrain.core.errors import ConfigError
from hpctrain.core.logs import logger
from hpctrain.core.python_compat import Self
from hpctrain.core.records import Records, finite, read, record_of

if TYPE_CHECKING:
    from hpctrain.train.loggers import Loggers

SHOWN = 5  # maximum number of damaged lines that a warning lists
RANKS = "ranks.json"  # name of the file with the latest times of each rank
RANKS_EVERY_S = 1.0
"""Shortest time between two writes of ``RANKS``, which has 60 kB with a thousand ranks."""


class Metrics:
    """Appends records to a file without buffering; a killed run loses at most the last record.

    Args:
        path: file of records, created if missing; None on ranks that write nothing: all calls are
            no-ops there.
        may_write: called before each record; if it returns False, the record is dropped.
        loggers: additional receivers of all records.
    """

    def __init__(
        self,
        path: Path | None,
        may_write: Callable[[], bool] = lambda: True,
        loggers: "Loggers | None" = None,
    ) -> None:
        self._may_write, self._loggers = may_write, loggers
        self._records = None if path is None else Records(path)
        self.num_records = 0 if path is None else len(read(path))
        """Number of records in the file, including records before a resume; 0 without a file."""
        self._ranks = None if path is None else path.with_name(RANKS)
        self._of_ranks: dict[str, Any] = {}
        self._ranks_at = -math.inf

    def write(self, event: str, **values: Any) -> None:
        """Append one record; numbers that are not finite become null, as JSON requires."""
        if self._records is None or not self._may_write():
            return
        elsewhere = "copy the run to another folder; then continue with --resume"
        with explained_writes("the file of records", self._records.path, elsewhere):
            self._records.append({"event": event, **values})
        self.num_records += 1
        if self._loggers is not None:
            self._loggers.write(finite({"event": event, **values}))

    def write_ranks(self, step: int, times: Mapping[str, Sequence[float]]) -> None:
        """Replace the file with the latest times of each rank.

        The file is written at most every ``RANKS_EVERY_S`` seconds, and on ``close``. Errors of
        the file system are ignored because the file only serves displays.

        Args:
            step: number of finished steps.
            times: by name, a list with the seconds of each rank.
        """
        self._of_ranks = {"step": step, **times}
        if time.monotonic() - self._ranks_at >= RANKS_EVERY_S:
            self._flush_ranks()

    def _flush_ranks(self) -> None:
        if self._ranks is None or not self._of_ranks or not self._may_write():
            return
        part = self._ranks.with_name(self._ranks.name + PART)
        with suppress(OSError):  # atomic but without fsync: no job resumes from this file
            part.write_text(json.dumps(self._of_ranks) + "\n")
            part.replace(self._ranks)
        self._of_ranks, self._ranks_at = {}, time.monotonic()

    def sync(self) -> None:
        """Wait until all records are on disk."""
        if self._records is not None:
            self._records.sync()

    def close(self) -> None:
        """Close the file."""
        if self._records is not None:
            self._flush_ranks()
            self._records.close()
        if self._loggers is not None:
            self._loggers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cut(path: Path, num_records: int, step: int) -> None:
    """Truncate ``metrics.jsonl`` atomically to its first records; no-op without a file.

    After a loss of power, lines may be missing or contain zeros. Lines that contain no record are
    removed with a warning.

    Args:
        path: file of records.
        num_records: number of lines to keep at most.
        step: records of steps after this step are removed, too.

    Raises:
        OSError: the file cannot be written.
    """
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")[:-1]
    records = [record_of(line) for line in lines]
    if damaged := [str(number) for number, record in enumerate(records, 1) if record is None]:
        logger.warning(
            f"{len(damaged)} of {len(lines)} lines of {path} are not records, perhaps after a "
            f"power failure: {', '.join(damaged[:SHOWN])}"
            f"{', ...' if len(damaged) > SHOWN else ''}; these lines are removed, and the run "
            f"continues"
        )
    # If line breaks were lost too, the first lines may include records of later steps.
    kept = [
        line
        for line, record in zip(lines[:num_records], records[:num_records], strict=True)
        if record is not None and record.get("step", 0) <= step
    ]
    with publishing(path) as part:
        part.write_bytes(b"".join(line + b"\n" for line in kept))


def result(record: Mapping[str, Any]) -> str:
    """Return the test result in the last record of a finished run, as text of one line."""
    metric = record["metric"]
    return f"test {record['metric_name']} {math.nan if metric is None else metric:.4f}"


def learned(run: Path, target_loss: float | None = None) -> dict[str, Any]:
    """Return measurements of a run: model size, throughput, batch, samples until a target loss.

    Args:
        run: run directory.
        target_loss: test loss to reach, or training loss if the run has no tests; if None, all
            samples of the run are counted.

    Returns:
        ``parameters``: number of parameter elements; ``samples_per_s``: samples per second of
        compute time on one rank; ``rank_batch`` and ``batch``: samples per step of one rank and
        of all ranks; ``samples``: number of samples until the target loss; ``noise_scale``: last
        gradient noise scale, if measured.

    Raises:
        ConfigError: the run has no step records, or has not reached ``target_loss``.
    """
    file = run / "metrics.jsonl"
    if not file.exists():
        raise ConfigError(
            f"{run} must be a run directory, but has no {file.name}; pass a run directory"
        )
    by_event: dict[str, list[dict[str, Any]]] = {}
    for record in read(file):
        if record.get("loss", record["event"]) is not None:
            by_event.setdefault(record["event"], []).append(record)
    begun = by_event.get("started", []) + by_event.get("resumed", [])
    steps, tests = by_event.get("step", []), by_event.get("test", [])
    if not begun or not steps:
        raise ConfigError(f"{file} has no step record yet; wait until the run has recorded a step")
    # Records have means over several steps, and the last batch of an epoch may be smaller. The
    # largest mean is therefore the size of a full batch.
    times = ("compute_s", "communication_s", "input_s")
    batch = max(round(r["samples_per_s"] * sum(r[t] for t in times)) for r in steps)
    share = batch / begun[-1]["world_size"]
    reached = [steps[-1]["step"]]
    if target_loss is not None:
        reached = [r["step"] for r in tests or steps if r["loss"] <= target_loss]
    if not reached:
        least = min(record["loss"] for record in tests or steps)
        raise ConfigError(
            f"{run} must have reached a loss of {target_loss:g}, but its lowest loss is "
            f"{least:.4g}; pass a loss that the run has reached, or --samples"
        )
    return {
        "parameters": float(begun[-1]["parameters"]),
        "samples_per_s": share / statistics.median(r["compute_s"] for r in steps),
        "rank_batch": math.ceil(share),
        "batch": batch,
        "samples": float(reached[0] * batch),
        **{name: r[name] for r in steps for name in ("noise_scale",) if name in r},
    }
