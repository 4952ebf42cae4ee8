"""Files of a study: what was asked, where it ran, and a record for each point and repeat."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from hpctrain.core.atomic import publishing
from hpctrain.core.errors import DataError
from hpctrain.core.records import read

Point = Mapping[str, Any]
"""The value of each factor of the study, by its name."""


def ranks_of(point: Point) -> int:
    """Return the number of ranks of a point: ``ranks``, else nodes times ranks per node."""
    found: int = point.get("ranks") or point.get("nodes", 1) * point.get("ranks_per_node", 1)
    return found


class _Json:
    """Base of what has a JSON object with the names of its fields."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make it from such an object.

        Raises ``DataError``: a field is missing, or there is one too many.
        """
        try:
            return cls(**values)
        except TypeError as error:
            raise DataError(
                f"a file of a study was written by another version of hpctrain: {error}; measure "
                f"again into another folder, or read it with that version"
            ) from None

    def as_dict(self) -> dict[str, Any]:
        """Return that object."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class PointRecord(_Json):
    """One repeat of one point. Times and bytes are of a step; None is what nobody has told.

    Lists have an entry for each step that counts. A step lasts as long as on its slowest rank.
    """

    point: Point
    repeat: int  # from 0
    order: int  # its place among all points and repeats of the study, from 0
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
    loss: float | None = None  # the last
    metric: float | None = None  # of the last test
    metric_name: str | None = None
    time_to_target_s: float | None = None  # warm-up included; None where it was not reached
    steps_to_target: int | None = None
    wall_s: float | None = None  # of the whole attempt, its start and end included

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks."""
        return self.samples / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFacts(_Json):
    """What a study asks: ``study.json``."""

    name: str
    mode: Literal["strong", "weak"]
    repeats: int
    seed: int  # of the order in which points are measured
    warm_up: str  # the rule by which first steps are dropped
    target: Mapping[str, float] | None  # such as {"loss": 0.1} or {"accuracy": 0.95}
    factors: Mapping[str, list[Any]]
    command: str
    launcher: str
    cores: int  # of a node


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment(_Json):
    """Where a study ran: ``environment.json``."""

    versions: Mapping[str, str | None]
    cpu: str
    cores: int  # of the host
    host: str
    commit: str | None  # of the folder in which the study was started; with "+" if changed
    topology: Any  # by point, as the first repeat has told it
    plan: Any  # how ranks communicate, by point
    slurm_job: str | None
    pinning: Any  # cores that this process may use, and what binds ranks


class StudyFolder:
    """The folder of a study, and its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "STUDY.toml"  # as it was measured
        self.study = path / "study.json"
        self.environment = path / "environment.json"
        self.attempts = path / "attempts"  # a folder for each, with all output

    def points_file(self, share: int | None = None) -> Path:
        """Return the file of the records; jobs of an array have one each, by their index."""
        return self.path / ("points.jsonl" if share is None else f"points-{share}.jsonl")

    def read_study(self) -> StudyFacts:
        """Read what is asked. Raises ``DataError``: there is no study, or it cannot be read."""
        return StudyFacts.from_dict(_load(self.study))

    def read_environment(self) -> Environment:
        """Read where it ran. Raises ``DataError``: the file is not there, or cannot be read."""
        return Environment.from_dict(_load(self.environment))

    def read_points(self) -> list[PointRecord]:
        """Read all records, in the order of the study; of several of one repeat the last counts.

        Raises ``DataError``: a record is of another version.
        """
        found = {}
        for path in sorted(self.path.glob("points*.jsonl")):
            for values in read(path, key="status"):
                record = PointRecord.from_dict(values)
                found[record.order] = record
        return [found[order] for order in sorted(found)]

    def write(self, path: Path, value: _Json | str) -> None:
        """Write a file of the study at once or not at all."""
        text = value if isinstance(value, str) else json.dumps(value.as_dict(), indent=2) + "\n"
        # Jobs of an array may write at the same time.
        with publishing(path, f"{path.name}.{platform.node()}-{os.getpid()}") as part:
            part.write_text(text, encoding="utf-8")


def _load(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"a study has a file {path.name} that can be read, {path.parent} does not: {error}; "
            f"hpctrain study run writes it"
        ) from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds an object, got {type(found).__name__}")
    return found
