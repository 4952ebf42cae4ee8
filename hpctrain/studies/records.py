"""Files of a study: what was asked, where it ran, and a record for each point and repeat."""

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

from hpctrain.cluster.load import BUSY
from hpctrain.core.atomic import publishing
from hpctrain.core.errors import DataError
from hpctrain.core.records import read
from hpctrain.studies.points import Attempt


@dataclass(frozen=True, kw_only=True, slots=True)
class PointRecord(Attempt):
    """What came of an attempt. Times and bytes are of a step; None is what nobody has told.

    Lists have an entry for each step that counts. A step lasts as long as on its slowest rank.
    """

    status: Literal["done", "failed"]
    oversubscribed: bool  # more ranks than cores: shows that it works, not how fast
    started: str  # in UTC
    folder: str  # of its output, below that of the study
    error: str | None = None  # why it failed, with the last lines of its output
    num_steps: int = 0  # steps that count
    warm_up_steps: int = 0  # steps before them, which were dropped
    step_s: list[float] = field(default_factory=list)  # empty where it failed
    samples: int = 0  # of all ranks, in the steps that count
    seconds: float = 0.0  # of the steps that count
    compute_s: list[float] | None = None  # mean over ranks
    communication_s: list[float] | None = None  # what computing did not hide, on the last to come
    input_s: list[float] | None = None  # wait for data, mean over ranks
    idle_s: list[float] | None = None  # wait for slower ranks, mean over ranks
    node_bytes: float | None = None  # moved in the memory of nodes, over all ranks
    rail_bytes: float | None = None  # sent by messages, over all ranks
    elapsed_s: float | None = None  # from the begin of the first step to the end, warm-up included
    loss: float | None = None  # the last
    metric: float | None = None  # of the last test
    metric_name: str | None = None
    time_to_target_s: float | None = None  # warm-up included; None where it was not reached
    steps_to_target: int | None = None
    wall_s: float | None = None  # of the whole attempt, its start and end included
    load: float | None = None  # of the machine that started it, at its end
    other_cores: float | None = None  # that other processes used there meanwhile, on average
    machine_cores: int | None = None  # of that machine
    mhz: float | None = None  # mean clock rate of its cores, at the end

    @property
    def is_done(self) -> bool:
        """Whether it measured something: steps that all have a duration."""
        times = [each or 0.0 for each in self.step_s]  # what was not finite is None in a file
        return self.status == "done" and bool(times) and all(0 < each < math.inf for each in times)

    @property
    def core_hours(self) -> float | None:
        """Core-hours for a million samples, with a core for each rank; None without samples."""
        rate = self.samples_per_s
        return None if rate is None else 1e6 * self.layout.ranks / rate / 3600

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes used much of the machine meanwhile."""
        return (self.other_cores or 0.0) > BUSY * (self.machine_cores or math.inf)

    @property
    def mean_step_s(self) -> float:
        """Time of a step: the mean, as a median would leave out what comes every few steps."""
        return fmean(self.step_s)

    @property
    def batch(self) -> float:
        """Samples of a step of all ranks: the mean, as a last batch may be short."""
        return self.samples / len(self.step_s)

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of all ranks: the harmonic mean of its steps; None where none was told."""
        return self.samples / self.seconds if self.samples and self.seconds else None


Environment = Mapping[str, Any]
"""Where a study ran: versions, mpi (the library of the ranks), cpu, cores and name of the host,
commit ("+" if changed), topology and plan of each point, slurm_job, and pinning: cores that it may
use, and what binds ranks."""


class StudyFolder:
    """The folder of a study, and its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "STUDY.toml"  # as it is measured
        self.environment = path / "environment.json"
        self.attempts = path / "attempts"  # a folder for each, with all output

    def points_file(self, repeat: int) -> Path:
        """Return the file of the records of a repeat: jobs may measure one each."""
        return self.path / f"points-{repeat}.jsonl"

    def read_environment(self) -> Environment | None:
        """Read where it ran; None where nobody has told, or what is told is not whole."""
        with suppress(OSError, ValueError):
            found: Environment = json.loads(self.environment.read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else None
        return None

    def read_points(self) -> list[PointRecord]:
        """Read all records, in the order of the study; of one repeat the last counts."""
        found = {}
        for path in sorted(self.path.glob("points*.jsonl")):
            for values in read(path, key="status"):
                try:
                    record = PointRecord(**values)
                except TypeError as error:
                    raise DataError(
                        f"{path} was written by another version of hpctrain: {error}; measure "
                        f"again into another folder, or read it with that version"
                    ) from None
                found[record.order] = record
        return [found[order] for order in sorted(found)]

    def write(self, path: Path, value: Environment | str) -> None:
        """Write a file of the study at once or not at all."""
        text = value if isinstance(value, str) else json.dumps(value, indent=2) + "\n"
        # Jobs of an array may write at the same time.
        with publishing(path, f"{path.name}.{platform.node()}-{os.getpid()}") as part:
            part.write_text(text, encoding="utf-8")
