"""Monitoring of a run by reading its files: progress, times of each rank, state of the job."""

import json
import os
import re
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpctrain.core.errors import ConfigError
from hpctrain.core.records import record_of
from hpctrain.launch.lease import BEAT, TIMES, Holder
from hpctrain.train.run_directory import RunDirectory
from hpctrain.train.run_status import Status, by_record, not_started

RECENT = 10  # number of step records from which the step time is computed

_CHECKPOINT = re.compile(r"step-(\d+)")
_TIMES = ("compute_s", "communication_s", "input_s")

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """Times of a step on one rank: means over the last steps, in seconds."""

    rank: int
    host: str
    compute_s: float
    communication_s: float  # not overlapped with compute; includes waiting for slower ranks
    input_s: float
    checkpoint_s: float = 0.0  # time that training waited for checkpoints
    slow: int = 0  # number of the last ten records in which this rank was slow

    @property
    def work_s(self) -> float:
        """Seconds per step for input and compute; other ranks wait for this work."""
        return self.compute_s + self.input_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """State of a run at one instant, from its files."""

    status: Status
    life: Literal["alive", "silent", "dead", "none"]
    """State of the job; ``silent``: its last heartbeat is too old; ``none``: there is no job."""
    holder: str  # description of the job; empty if there is none
    heartbeat_age_s: float | None
    record_age_s: float | None
    begun: Record  # record of the last start or resume; empty if not started
    last: Record  # last step record; empty if there is none
    test: Record  # last record of a test during training; empty if there is none
    step: int  # number of finished steps
    step_s: float | None  # mean step time in the last records; None without step records
    checkpoints: list[int]  # steps of the checkpoints, oldest first
    ranks: list[RankTimes]  # times by rank; empty if there is no file of times

    @property
    def left_s(self) -> float | None:
        """Estimated duration of the remaining steps, without tests and checkpoints."""
        if self.step_s is None or "num_steps" not in self.begun:
            return None
        return float((self.begun["num_steps"] - self.step) * self.step_s)

    @property
    def slowest(self) -> RankTimes | None:
        """Times of the rank with the most work; None without times."""
        return max(self.ranks, key=lambda rank: rank.work_s, default=None)

    @property
    def median_work_s(self) -> float:
        """Median of ``work_s`` over the ranks; ``ranks`` must not be empty."""
        return statistics.median_low(rank.work_s for rank in self.ranks)

    @property
    def has_ended(self) -> bool:
        """Whether no job runs any more."""
        return self.status.state == "finished" or self.life in ("none", "dead")


class _Age:
    """Measures the age of a file, with the clock of this process if possible.

    Until a change of the file is observed, the age is computed from the modification time, which
    depends on the clock of the file server.
    """

    def __init__(self) -> None:
        self._mark: tuple[int, ...] = ()
        self._seen_at = self._before_s = 0.0

    def look(self, path: Path) -> float | None:
        """Return seconds since the last change; None if the file cannot be read."""
        try:
            with path.open("rb") as file:  # a network file system revalidates attributes on open
                found = os.fstat(file.fileno())
        except OSError:
            return None
        mark, now = (found.st_ino, found.st_size, found.st_mtime_ns), time.monotonic()
        if mark != self._mark:
            self._before_s = 0.0 if self._mark else max(0.0, time.time() - found.st_mtime)
            self._mark, self._seen_at = mark, now
        return self._before_s + now - self._seen_at


class RunWatch:
    """Reads new entries in the files of a run; needs neither MPI nor torch."""

    def __init__(self, path: Path) -> None:
        self._directory = RunDirectory(path)
        self._heartbeat, self._record_age = _Age(), _Age()
        self._forget()

    def _forget(self) -> None:
        self._inode, self._offset = -1, 0
        self._begun: Record = {}
        self._last: dict[str, Record] = {}  # last record by event; "" is any event
        self._steps: deque[Record] = deque(maxlen=RECENT + 1)

    def look(self) -> RunView:
        """Read new records and return the current state.

        Raises:
            ConfigError: the directory contains no run, or a file is damaged.
        """
        self._read_records()
        path = self._directory.path
        life, holder, age_s = self._life()
        if "" not in self._last and life in ("none", "dead"):
            raise ConfigError(not_started(path))
        status = by_record(path, self._last.get("", {}))
        if status.state == "killed" and life not in ("none", "dead"):
            status = Status("running", f"{path} is running{status.where}", status.where)
        return RunView(
            status=status,
            life=life,
            holder=holder,
            heartbeat_age_s=age_s,
            record_age_s=self._record_age.look(self._directory.metrics),
            begun=self._begun,
            last=self._last.get("step", {}),
            test=self._last.get("test", {}),
            step=self._last.get("", {}).get("step", 0),
            step_s=self._step_s(),
            checkpoints=self._checkpoints(),
            ranks=self._ranks(),
        )

    def _read_records(self) -> None:
        path = self._directory.metrics
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                # A resumed run replaces the file with a truncated copy.
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._forget()
                    self._inode = found.st_ino
                file.seek(self._offset)
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"the records of the run cannot be read: {error}") from None
        self._offset += sum(len(line) + 1 for line in lines)
        for record in filter(None, map(record_of, lines)):
            self._take(record)
        if lines and not self._last:
            raise ConfigError(
                f"records of a run must be JSON objects with an event, but {path} begins with "
                f"{lines[0][:40]!r}; --resume removes other lines, and continues"
            )

    def _take(self, record: Record) -> None:
        event = record["event"]
        self._last[event] = record
        self._last[""] = {"step": self._last.get("", {}).get("step", 0)} | record
        if event in ("started", "resumed"):
            self._begun = record
            self._steps.clear()
            self._steps.append(self._last[""])
        elif event == "step":
            self._steps.append(record)

    def _life(self) -> tuple[Literal["alive", "silent", "dead", "none"], str, float | None]:
        """Return state and description of the job, and the age of its last heartbeat."""
        holder = Holder.read(self._directory.path)
        if holder is None:
            return "none", "", None
        age_s = self._heartbeat.look(self._directory.path / f"lease-{holder.token}{BEAT}")
        if holder.is_gone(Holder.here()):
            return "dead", holder.describe(), age_s
        is_silent = age_s is None or age_s > TIMES.stale_s
        return "silent" if is_silent else "alive", holder.describe(), age_s

    def _step_s(self) -> float | None:
        """Return the mean time of the last steps; None without step records."""
        if len(self._steps) <= 1:
            return None
        steps = [record["step"] for record in self._steps]
        seconds = sum(
            (step - before) * sum(record[name] for name in _TIMES)
            for before, step, record in zip(steps, steps[1:], list(self._steps)[1:], strict=False)
        )
        return float(seconds / (steps[-1] - steps[0]))

    def _checkpoints(self) -> list[int]:
        paths = self._directory.checkpoints.glob("step-*")
        found = (_CHECKPOINT.fullmatch(path.name) for path in paths)
        return sorted(int(match[1]) for match in found if match)

    def _ranks(self) -> list[RankTimes]:
        """Return the times of each rank; empty if a run on other ranks wrote the file of times."""
        path = self._directory.ranks
        try:
            found = json.loads(path.read_bytes())
            columns = {name: [*map(float, found[name])] for name in _TIMES}
            nothing = [0.0] * len(columns[_TIMES[0]])  # older versions did not write these columns
            columns["checkpoint_s"] = [*map(float, found.get("checkpoint_s", nothing))]
            columns["slow"] = [*map(int, found.get("slow", nothing))]
            rows = list(zip(*columns.values(), strict=True))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"the times of ranks must be lists of one length, but reading {path} raised "
                f"{error!r}; remove the file, which a running job writes again"
            ) from None
        if len(rows) != self._begun.get("world_size"):
            return []
        hosts = {r: host for host, ranks in self._begun.get("hosts", {}).items() for r in ranks}
        return [
            RankTimes(rank=rank, host=hosts.get(rank, ""), **dict(zip(columns, row, strict=True)))
            for rank, row in enumerate(rows)
        ]
