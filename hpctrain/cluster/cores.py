"""The cores this process may use: its affinity mask, and what a container's quota leaves of it."""

import os
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def affinity() -> tuple[int, ...]:
    """Return the hardware threads of the affinity mask, sorted; all where there is no mask."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def quota(root: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return how many cores' worth of time the cgroups allow, ``None`` when unlimited.

    The quota is shared by all processes of the container: ranks that live in it divide it.
    A limit of any parent group counts. Reads cgroup version 2 and, else, version 1.
    """
    limits = [
        int(words[0]) / int(words[1])
        for folder in _groups(root, membership)
        if len(words := _words(folder)) == 2 and words[0].isdigit() and int(words[1]) > 0
    ]
    return min(limits, default=None)


def format_numbers(numbers: Iterable[int]) -> str:
    """Write a set of cores or ranks as the kernel does: ``0-3,8``."""
    runs = [
        [number for _, number in group]
        for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _groups(root: Path, membership: Path) -> list[Path]:
    """List the folders of our cgroup and its parents, in both versions."""
    folders = []
    lines = membership.read_text().splitlines() if membership.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "" or "cpu" in controllers.split(","):
            base = root / controllers
            own = base / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return folders


def _words(folder: Path) -> list[str]:
    """Read limit and period in microseconds; fewer than two words when there is no limit."""
    try:
        if (folder / "cpu.max").exists():
            return (folder / "cpu.max").read_text().split()
        files = (folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        return [file.read_text().strip() for file in files]
    except OSError:
        return []
