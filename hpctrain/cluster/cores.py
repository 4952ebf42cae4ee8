"""The cores this process may use: its affinity mask, and what a container's quota leaves of it."""

import os
from pathlib import Path

from hpctrain.cluster.cgroups import CGROUPS, MEMBERSHIP, folders


def affinity() -> tuple[int, ...]:
    """Return the hardware threads of the affinity mask, sorted; all where there is no mask."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def quota(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Return how many cores' worth of time the cgroups allow, ``None`` when unlimited.

    The quota is shared by all processes of the container: ranks that live in it divide it.
    A limit of any parent group counts. Reads cgroup version 2 and, else, version 1.
    """
    limits = [
        int(words[0]) / int(words[1])
        for folder in folders("cpu", root, membership)
        if len(words := _words(folder)) == 2 and words[0].isdigit() and int(words[1]) > 0
    ]
    return min(limits, default=None)


def _words(folder: Path) -> list[str]:
    """Read limit and period in microseconds; fewer than two words when there is no limit."""
    try:
        if (folder / "cpu.max").exists():
            return (folder / "cpu.max").read_text().split()
        files = (folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        return [file.read_text().strip() for file in files]
    except OSError:
        return []
