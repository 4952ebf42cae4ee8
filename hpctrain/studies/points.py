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
"""Launcher that replaces ``LAUNCH`` in Slurm jobs."""


MOST_RANKS = 2**31 - 1  # MPI stores a rank in a C int

Point = Mapping[str, Any]
"""Value of each factor of the study, by name."""


class Placement(NamedTuple):
    """Numbers of ranks, nodes and ranks per node of a point."""

    ranks: int
    nodes: int
    ranks_per_node: int  # maximum over nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class PointRepeat:
    """One repeat of a point."""

    point: Point
    repeat: int  # index of the repeat, from 0
    order: int  # index among all repeats of all points, from 0

    @property
    def layout(self) -> Placement:
        """Ranks and nodes of the point."""
        found = layout_of(self.point)
        assert found is not None
        return found

    @property
    def name(self) -> str:
        """Name of the folder of this repeat."""
        return f"{self.order:04d}"

    @property
    def text(self) -> str:
        """Text with all factors of the point, which identifies the point."""
        return " ".join(f"{name}={value}" for name, value in self.point.items())

    def names(self, mode: str, folder: Path) -> dict[str, Any]:
        """Return the value of each name that texts of [command] can contain in braces.

        ``mode`` is the mode of the study; a factor ``mode`` of the point replaces it.
        """
        mode = self.point.get("mode", mode)
        found = {**self.point, **self.layout._asdict(), "repeat": self.repeat, "folder": folder}
        if "batch" in found:
            batch, ranks = found["batch"], self.layout.ranks
            found["global_batch"] = batch * ranks if mode == "weak" else batch
            found["rank_batch"] = batch if mode == "weak" else batch // ranks
        return found

    def is_oversubscribed(self, cores: int, hosts: int) -> bool:
        """Return True if the ranks outnumber the cores of their hosts.

        A host has ``cores`` cores. Nodes beyond ``hosts`` share these hosts.
        """
        return self.layout.ranks > cores * min(self.layout.nodes, hosts)


def layout_of(point: Point) -> Placement | None:
    """Return ranks and nodes of a point; None if its factors contradict each other.

    Without the factor ``nodes``, the point has the minimum number of nodes for its ranks per node.
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
    """Return all repeats of all points in the order of measurement.

    Every repeat contains all points in a new random order, so that drift during a study affects
    all points equally. The order of a repeat depends only on the seed and the points, so that
    repeats can be added later.

    Raises:
        ConfigError: ranks and nodes contradict each other in every combination of factors, or the
            batch of a point is not a multiple of its ranks.
    """
    combinations = (
        dict(zip(config.factors, values, strict=True))
        for values in itertools.product(*config.factors.values())
    )
    points = [point for point in combinations if layout_of(point) is not None]
    if not points:
        raise ConfigError(
            f"a point must have at least as many ranks as nodes, and nodes x ranks_per_node ranks "
            f"if all three are factors, got {dict(config.factors)}; add such a combination"
        )
    found: list[PointRepeat] = []
    for repeat in range(config.study.repeats):
        shuffled = random.Random(f"{config.study.seed}/{repeat}").sample(points, len(points))  # noqa: S311
        for point in shuffled:
            found.append(PointRepeat(point=point, repeat=repeat, order=len(found)))
    if config.uses("rank_batch"):
        for attempt in found:
            batch, ranks = attempt.point["batch"], attempt.layout.ranks
            if config.mode_of(attempt.point) == "strong" and batch % ranks:
                raise ConfigError(
                    f"factors.batch must be a multiple of the ranks for {{rank_batch}}, got a "
                    f"batch of {batch} for {ranks} ranks; choose a multiple, or mode = weak"
                )
    return found


def on_slurm(config: StudyConfig) -> StudyConfig:
    """Return the study for Slurm: on real nodes, and with ``srun`` as the default launcher."""
    nodes = max(attempt.layout.nodes for attempt in attempts_of(config))
    launcher = SRUN if config.command.launcher == LAUNCH else config.command.launcher
    return replace(
        config,
        study=replace(config.study, hosts=max(config.study.hosts, nodes)),
        command=replace(config.command, launcher=launcher),
    )
