"""Points of a study, and the random order in which their repeats are measured."""

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.core.errors import ConfigError
from hpctrain.studies.study_file import LAUNCH, StudyConfig

SRUN = (
    "srun --nodes={nodes} --ntasks={ranks} --ntasks-per-node={ranks_per_node} "
    "--kill-on-bad-exit=1 --cpu-bind=cores"
)
"""Takes the place of ``LAUNCH`` in jobs of Slurm."""


Point = Mapping[str, Any]
"""The value of each factor of the study, by its name."""


class Placement(NamedTuple):
    """How large a point is."""

    ranks: int
    nodes: int
    ranks_per_node: int  # the most of a node


@dataclass(frozen=True, kw_only=True, slots=True)
class PointRepeat:
    """One repeat of one point."""

    point: Point
    repeat: int  # from 0
    order: int  # its place among all points and repeats of the study, from 0

    @property
    def layout(self) -> Placement:
        """How large it is."""
        found = layout_of(self.point)
        assert found is not None
        return found

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.order:04d}"

    @property
    def text(self) -> str:
        """The point in one line, for people and as a key."""
        return " ".join(f"{name}={value}" for name, value in self.point.items())

    def names(self, mode: str, folder: Path) -> dict[str, Any]:
        """Return what names in braces stand for."""
        found = {**self.point, **self.layout._asdict(), "repeat": self.repeat, "folder": folder}
        if "batch" in found:
            batch, ranks = found["batch"], self.layout.ranks
            found["global_batch"] = batch * ranks if mode == "weak" else batch
            found["rank_batch"] = batch if mode == "weak" else batch // ranks
        return found

    def is_oversubscribed(self, cores: int, hosts: int) -> bool:
        """Say whether it has more ranks than cores, on so many hosts of so many cores."""
        return self.layout.ranks > cores * min(self.layout.nodes, hosts)


def layout_of(point: Point) -> Placement | None:
    """Return how large a point is; None where its factors contradict each other.

    Nodes that nobody tells are as many as needed, one without ranks per node.
    """
    ranks, nodes, each = (point.get(name) for name in Placement._fields)
    if ranks is None:
        nodes, each = nodes or 1, each or 1
        return Placement(nodes * each, nodes, each)
    nodes = nodes or (1 if each is None else -(-ranks // each))
    if nodes > ranks or (each is not None and "nodes" in point and ranks != nodes * each):
        return None
    return Placement(ranks, nodes, -(-ranks // nodes))


def attempts_of(config: StudyConfig) -> list[PointRepeat]:
    """Return all repeats of all points in the order in which they are measured.

    In every repeat all points come, in an order of its own: whatever drifts while a study runs
    meets all points alike. The order of a repeat depends on seed and points alone, so that more
    repeats can follow later.

    Raises ``ConfigError``: factors contradict each other in all points, or the ranks of one
    cannot share its batch.
    """
    combinations = (
        dict(zip(config.factors, values, strict=True))
        for values in itertools.product(*config.factors.values())
    )
    points = [point for point in combinations if layout_of(point) is not None]
    if not points:
        raise ConfigError(
            f"a point has at least as many ranks as nodes, and nodes x ranks_per_node ranks where "
            f"all are told; none of these has: {dict(config.factors)}"
        )
    found: list[PointRepeat] = []
    for repeat in range(config.study.repeats):
        shuffled = random.Random(f"{config.study.seed}/{repeat}").sample(points, len(points))  # noqa: S311
        for point in shuffled:
            found.append(PointRepeat(point=point, repeat=repeat, order=len(found)))
    if config.study.mode == "strong" and config.uses("rank_batch"):
        for attempt in found:
            batch, ranks = attempt.point["batch"], attempt.layout.ranks
            if batch % ranks:
                raise ConfigError(
                    f"factors.batch is divided among the ranks for {{rank_batch}}, and {ranks} "
                    f"ranks cannot share {batch} samples alike; choose a multiple, or mode = weak"
                )
    return found


def on_slurm(config: StudyConfig) -> StudyConfig:
    """Return a study on real nodes, started by ``srun`` unless another launcher is set."""
    nodes = max(attempt.layout.nodes for attempt in attempts_of(config))
    launcher = SRUN if config.command.launcher == LAUNCH else config.command.launcher
    return replace(
        config,
        study=replace(config.study, hosts=max(config.study.hosts, nodes)),
        command=replace(config.command, launcher=launcher),
    )
