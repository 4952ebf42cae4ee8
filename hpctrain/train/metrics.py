"""Records of a run, one JSON object per line; beside them the last times of each rank."""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.atomic import PART, publishing, refusal
from hpctrain.core.errors import ConfigError
from hpctrain.core.logs import logger
from hpctrain.core.python_compat import Self
from hpctrain.core.records import Records, finite, read, record_of

if TYPE_CHECKING:
    from hpctrain.train.loggers import Loggers

SHOWN = 5  # damaged lines that a warning names
RANKS = "ranks.json"  # the last times of each rank, beside the records
RANKS_EVERY_S = 1.0
"""At most so often they are written: a thousand ranks fill 60 kB."""


class Metrics:
    """Appends records to a file, each at once, so that a killed run has all but the last.

    On ranks that write nothing, ``path`` is None and every call returns at once.
    """

    def __init__(
        self,
        path: Path | None,
        may_write: Callable[[], bool] = lambda: True,
        loggers: "Loggers | None" = None,
    ) -> None:
        """Open the file, which is made if missing; all records go to ``loggers`` too.

        ``may_write`` is asked before each record; one that may not be written is left out, and
        whoever has asked for it learns elsewhere why.
        """
        self._may_write, self._loggers = may_write, loggers
        self._records = None if path is None else Records(path)
        self.num_records = 0 if path is None else len(read(path))
        """Records of the file, those of earlier parts of the run included; 0 without a file."""
        self._ranks = None if path is None else path.with_name(RANKS)
        self._of_ranks: dict[str, Any] = {}
        self._ranks_at = -math.inf

    def write(self, event: str, **values: Any) -> None:
        """Append one record; a number that is not finite becomes null, as JSON has none."""
        if self._records is None or not self._may_write():
            return
        try:
            self._records.append({"event": event, **values})
        except OSError as error:
            raise ConfigError(
                f"the records of the run cannot be written to {self._records.path}: "
                f"{refusal(error, 'copy the run to another folder')}; then continue with --resume"
            ) from error
        self.num_records += 1
        if self._loggers is not None:
            self._loggers.write(finite({"event": event, **values}))

    def write_ranks(self, step: int, times: Mapping[str, Sequence[float]]) -> None:
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


def result(record: Mapping[str, Any]) -> str:
    """Say for people what the last test of a finished run has given; null is not finite."""
    metric = record["metric"]
    return f"test {record['metric_name']} {math.nan if metric is None else metric:.4f}"


def learned(run: Path, target_loss: float | None = None) -> dict[str, Any]:
    """Say what a run has shown of its model, and how many samples it took to a loss.

    A loss counts in tests if there are any; without one, all samples do.

    Returns:
        ``parameters``; ``samples_per_s`` of a rank that computes alone; ``rank_batch``, ``batch``
        and ``samples``; ``noise_scale``, the last one, where the run has told it.
    """
    file = run / "metrics.jsonl"
    if not file.exists():
        raise ConfigError(f"{run} is no run directory: it has no {file.name}; give one that does")
    by_event: dict[str, list[dict[str, Any]]] = {}
    for record in read(file):
        if record.get("loss", record["event"]) is not None:
            by_event.setdefault(record["event"], []).append(record)
    begun = by_event.get("started", []) + by_event.get("resumed", [])
    steps, tests = by_event.get("step", []), by_event.get("test", [])
    if not begun or not steps:
        raise ConfigError(f"{file} has no record of a step; let the run go on for a while first")
    # The mean over the steps of a record; the last step of an epoch may be short.
    times = ("compute_s", "communication_s", "input_s")
    batch = max(round(r["samples_per_s"] * sum(r[t] for t in times)) for r in steps)
    share = batch / begun[-1]["world_size"]
    reached = [steps[-1]["step"]]
    if target_loss is not None:
        reached = [r["step"] for r in tests or steps if r["loss"] <= target_loss]
    if not reached:
        least = min(record["loss"] for record in tests or steps)
        raise ConfigError(
            f"{run} has not reached a loss of {target_loss:g}, its least is {least:.4g}; give a "
            f"loss that it has reached, or --samples"
        )
    return {
        "parameters": float(begun[-1]["parameters"]),
        "samples_per_s": share / statistics.median(r["compute_s"] for r in steps),
        "rank_batch": math.ceil(share),
        "batch": batch,
        "samples": float(reached[0] * batch),
        **{name: r[name] for r in steps for name in ("noise_scale",) if name in r},
    }
