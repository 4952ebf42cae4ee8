"""Files of a study: configuration, environment, and a record for each repeat of each point."""

import json
import math
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from hpctrain.cluster.machine_load import BUSY
from hpctrain.core.atomic import publishing
from hpctrain.core.errors import DataError
from hpctrain.core.formats import fault_of
from hpctrain.core.records import read
from hpctrain.studies.points import PointRepeat


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Measurements of the steps after the warm-up: durations, samples and bytes.

    Times and bytes are per step; lists have one entry per step. The duration of a step is its
    duration on the slowest rank. None means that some rank did not record the value.
    """

    num_steps: int = 0
    warm_up_steps: int = 0  # dropped before the counted steps
    step_s: list[float] = field(default_factory=list)  # empty if the repeat failed
    samples: int = 0  # sum over ranks and steps
    seconds: float = 0.0  # sum over steps
    compute_s: list[float] | None = None  # mean over ranks
    communication_s: list[float] | None = None  # exposed; on the rank that waits least for others
    input_s: list[float] | None = None  # wait for data, mean over ranks
    idle_s: list[float] | None = None  # wait for slower ranks, mean over ranks
    node_bytes: float | None = None  # copied in node memory, sum over ranks
    rail_bytes: float | None = None  # sent between nodes, sum over ranks

    @property
    def mean_step_s(self) -> float:
        """Mean step time; a median would ignore work that is done only in some steps."""
        return fmean(self.step_s)

    @property
    def batch(self) -> float:
        """Mean samples per step of all ranks; the last batch of an epoch may be smaller."""
        return self.samples / len(self.step_s)

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of all ranks; None if no samples were recorded."""
        return self.samples / self.seconds if self.samples and self.seconds else None


@dataclass(frozen=True, kw_only=True)
class LearningRecord:
    """Progress of the training; times start at the first step and include the warm-up."""

    elapsed_s: float | None = None
    loss: float | None = None  # loss of the last step
    metric: float | None = None  # metric of the last test
    metric_name: str | None = None
    time_to_target_s: float | None = None  # None if the target was not reached
    steps_to_target: int | None = None


@dataclass(frozen=True, kw_only=True)
class HostRecord:
    """Load of the hosts of a repeat.

    The ranks measure ``other_cores`` and ``mhz`` on all hosts during the counted steps. The host
    that started the ranks measures all other fields, over the whole repeat or at its end. If the
    counted steps are shorter than the time between two samples of a rank, this host measures all
    fields.
    """

    load: float | None = None
    other_cores: float | None = None  # mean cores used by other processes, on the busiest host
    machine_cores: int | None = None
    mhz: float | None = None  # mean clock rate of the cores
    celsius: float | None = None  # highest temperature of a sensor of the processors
    num_throttled: int | None = None  # how often the processors lowered their clock rate

    @property
    def is_disturbed(self) -> bool:
        """True if other processes used a large fraction of the host's cores."""
        return (self.other_cores or 0.0) > BUSY * (self.machine_cores or math.inf)


@dataclass(frozen=True, kw_only=True)
class ResourceRecord:
    """Resources that the ranks used in the counted steps; a field is None if it is unknown."""

    gpu: str | None = None  # name of the GPUs
    gpu_busy: float | None = None  # fraction of time with a running kernel, mean over ranks
    gpu_memory_bytes: float | None = None  # largest use of a GPU's memory
    host_memory_bytes: float | None = None  # largest resident memory of a rank
    read_bytes: float | None = None  # by system calls, sum over ranks, per step
    written_bytes: float | None = None
    power_w: float | None = None  # mean power, sum over nodes
    power_source: str | None = None  # counters from which ``power_w`` is computed


@dataclass(frozen=True, kw_only=True)
class PointRecord(HostRecord, ResourceRecord, LearningRecord, StepRecord, PointRepeat):
    """Result of a repeat of a point: a line of ``points-REPEAT.jsonl``."""

    status: Literal["done", "failed"]
    oversubscribed: bool  # True if ranks outnumber cores; the times then do not measure speed
    started: str  # time of the start in UTC
    folder: str  # folder of the repeat, relative to the folder of the study
    error: str | None = None  # cause of the failure, with the last lines of the output
    wall_s: float | None = None  # time of the whole repeat, including start-up and exit

    @property
    def is_done(self) -> bool:
        """True if the repeat succeeded and all its steps have a positive, finite duration."""
        times = [each or 0.0 for each in self.step_s]  # a file stores None for NaN and infinity
        return self.status == "done" and bool(times) and all(0 < each < math.inf for each in times)

    @property
    def core_hours(self) -> float | None:
        """Core-hours per million samples, if each rank uses one core; None without samples."""
        rate = self.samples_per_s
        return None if rate is None else 1e6 * self.layout.ranks / rate / 3600


VERSION, READER = 1, "1.0"  # version of the format, and the oldest hpctrain that reads it

Environment = Mapping[str, Any]
"""Environment of a study, with the keys: version and reader (see ``formats.stamp``), versions (of
packages), mpi (library of the ranks), cpu, cores, host, commit (with "+" if files differ from it),
files (checksums of the scripts), topology and plan (for each point), slurm_job, and pinning (the
allowed cores, and the variables that bind ranks)."""


class StudyFolder:
    """Paths of the files of a study in its folder, and methods that read and write them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "STUDY.toml"  # the configuration
        self.environment = path / "environment.json"
        self.attempts = path / "attempts"  # a folder for each repeat
        self.imported = path / "imported"  # results of other tools

    def points_file(self, repeat: int) -> Path:
        """Return the file for the records of a repeat.

        Each repeat has its own file, because jobs may measure different repeats concurrently.
        """
        return self.path / f"points-{repeat}.jsonl"

    def read_environment(self) -> Environment | None:
        """Return the recorded environment, or None if the file is missing or incomplete.

        Raises ``DataError``: a newer hpctrain wrote the folder, in a newer format.
        """
        found: Any = None
        with suppress(OSError, ValueError):
            found = json.loads(self.environment.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            return None
        if fault := fault_of(found, VERSION):
            raise DataError(f"the study {self.path} cannot be read: {fault}")
        return found

    def read_points(self) -> list[PointRecord]:
        """Return the last record of each repeat of each point, in the order of measurement."""
        found = {}
        for path in sorted(self.path.glob("points*.jsonl")):
            for values in read(path, key="status"):
                try:
                    record = PointRecord(**values)
                except TypeError as error:
                    raise DataError(
                        f"{path} must have records of this version of hpctrain, but reading "
                        f"failed: {error}; measure again into another folder, or read the "
                        "file with the version that wrote it"
                    ) from None
                found[record.order] = record
        return [found[order] for order in sorted(found)]

    def write(self, path: Path, value: Environment | str) -> None:
        """Write a file of the study atomically."""
        text = value if isinstance(value, str) else json.dumps(value, indent=2) + "\n"
        # Jobs of an array may write concurrently, so the temporary names differ.
        with publishing(path, f"{path.name}.{platform.node()}-{os.getpid()}") as part:
            part.write_text(text, encoding="utf-8")
