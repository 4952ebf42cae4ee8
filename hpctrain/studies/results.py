"""Results of a study as reports need them: records, summaries, bounds, and names of points."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hpctrain.core.errors import DataError
from hpctrain.core.records import read
from hpctrain.cost.machine import Machine
from hpctrain.studies.attempt import RECORDS
from hpctrain.studies.points import Placement, layout_of
from hpctrain.studies.records import Environment, Point, PointRecord, StudyFolder
from hpctrain.studies.statistics import (
    SIZES,
    Estimate,
    PointSummary,
    curve_of,
    median,
    summarize,
)
from hpctrain.studies.study_file import StudyConfig, load

StepBound = Callable[[Point], float]
"""Seconds which a step at a point takes at least, by a model of the machine."""

MAX_NAME = 60  # characters
MAX_POINTS = 100  # of a curve


@dataclass(frozen=True)
class StudyResults:
    """What a study has measured."""

    config: StudyConfig
    environment: Environment | None
    records: list[PointRecord]
    directory: Path = Path()
    bound: StepBound | None = None

    @classmethod
    def read(cls, directory: Path) -> "StudyResults":
        """Read the folder of a study.

        Raises ``DataError``: there is no study, or one of its files cannot be read.
        """
        folder = StudyFolder(directory)
        if not folder.file.exists():
            raise DataError(
                f"the folder of a study has a {folder.file.name}, {directory} has none; "
                f"hpctrain study run writes it"
            )
        return cls(load(folder.file), folder.read_environment(), folder.read_points(), directory)

    @cached_property
    def summaries(self) -> list[PointSummary]:
        """One for each point, curve by curve, in the order of the factors."""
        factors = [item for item in self.config.factors.items() if item[0] not in SIZES]

        def place(summary: PointSummary) -> list[int]:
            found = [(summary.point.get(name), values) for name, values in factors]
            return [values.index(mine) if mine in values else -1 for mine, values in found]

        return sorted(summarize(self.records, self.config.study.mode), key=place)

    @cached_property
    def done(self) -> list[PointRecord]:
        """Records of what was measured."""
        return [each for each in self.records if each.is_done]

    @cached_property
    def failed(self) -> list[PointRecord]:
        """Records of what was tried and gave nothing."""
        return [each for each in self.records if not each.is_done]

    @cached_property
    def headline(self) -> str:
        """What was measured, in one line."""
        host = f" on {shown(self.environment.get('host'))}" if self.environment else ""
        table = self.config.study
        return (
            f"{shown(table.name)}: {table.mode} scaling{host}, {len(self.summaries)} points, "
            f"{len(self.done)} repeats measured, {len(self.failed)} failed"
        )

    def repeats(self, point: Point) -> list[PointRecord]:
        """Return what was measured at a point."""
        return [record for record in self.done if record.point == point]

    def median_of(self, point: Point, name: str) -> Estimate | None:
        """Return the median of a field of the repeats; None where one of them lacks it.

        A median of those that reached a target, without the others, would flatter the point.
        """
        told = [getattr(record, name) for record in self.repeats(point)]
        return median(told) if told and None not in told else None

    def ideal_s(self, summary: PointSummary) -> float | None:
        """Return the time of a step if every rank were used as well as those of the base."""
        base = next((each for each in self.summaries if each.point == summary.base), None)
        if base is None or base.step_s is None:
            return None
        growth = summary.ranks / base.ranks if self.config.study.mode == "strong" else 1
        return base.step_s.value / growth

    def beside(self, machine: Machine) -> "StudyResults":
        """Return these results with a bound: what a machine's links allow for the bytes moved.

        A step takes at least the ideal time, as if all communication were hidden, and at least
        as long as its bytes need when all links between nodes, or in them, are busy at once.
        """

        def least_s(point: Point) -> float:
            summary = next(each for each in self.summaries if each.point == point)
            layout = layout_of(point) or Placement(summary.ranks, 1, summary.ranks)
            rates = {
                "rail_bytes": layout.nodes * machine.nics * machine.network.bytes_per_s,
                "node_bytes": layout.ranks * machine.node.bytes_per_s,
            }
            moved = {name: self.median_of(point, name) for name in rates}
            times = [found.value / rates[name] for name, found in moved.items() if found]
            return max(self.ideal_s(summary) or 0.0, *times, 0.0)

        return replace(self, bound=least_s)

    def learning_curve(self, record: PointRecord, name: str) -> list[tuple[float, float]]:
        """Return seconds and value of what one of its ranks told; empty where that is gone."""
        for path in sorted((self.directory / record.folder / RECORDS).glob("*.jsonl")):
            lines = read(path, key="at")
            told = [(each["at"] - lines[0]["at"], each[name]) for each in lines if name in each]
            if told:
                return told[:: len(told) // MAX_POINTS + 1]
        return []

    def label(self, point: Point) -> str:
        """Return what tells a point from the others."""
        return label_of(self._told(point) or point)

    def curve(self, point: Point) -> str:
        """Return what tells the curve of a point from others; empty where there is one."""
        return label_of(self._told(curve_of(point)))

    def _told(self, point: Point) -> Point:
        return {name: value for name, value in point.items() if name in self._varying}

    @cached_property
    def _varying(self) -> list[str]:
        points = [record.point for record in self.records]
        names = dict.fromkeys(name for point in points for name in point)
        return [name for name in names if len({repr(p.get(name)) for p in points}) > 1]


def label_of(point: Point) -> str:
    """Return the factors of a point in one line."""
    return ", ".join(f"{shown(name)} {shown(value)}" for name, value in point.items())


def shown(value: Any) -> str:
    """Return a value as a short line without control characters, for labels of any kind."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 1]}\N{HORIZONTAL ELLIPSIS}"
