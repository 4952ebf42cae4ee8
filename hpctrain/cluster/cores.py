"""The cores that this process, its job and its container may use."""

import os
from collections.abc import Mapping
from pathlib import Path

from hpctrain.cluster import env
from hpctrain.cluster.cgroups import CGROUPS, MEMBERSHIP, folders

SIBLINGS = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")


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


def num_granted(
    environ: Mapping[str, str] | None = None,
    root: Path = CGROUPS,
    membership: Path = MEMBERSHIP,
    siblings: Path = SIBLINGS,
) -> int:
    """Count the cores, not their hardware threads, that the job has on this host, bound or not.

    Slurm tells; other schedulers are taken at what the mask says; without one all cores of the
    container or the machine count. A virtual node may claim more than there are.
    """
    environ = os.environ if environ is None else environ
    files = ("cpuset.cpus.effective", "cpuset.effective_cpus")  # versions 2 and 1
    sets = [
        _count(folder / file) for folder in folders("cpuset", root, membership) for file in files
    ]
    there = min([os.cpu_count() or 1, *filter(None, sets)])
    told = environ.get("SLURM_CPUS_ON_NODE", "")
    if told.isdigit():
        there = min(int(told), there)
    elif env.scheduler(environ):
        there = min(len(affinity()), there)
    return max(1, there // num_siblings(siblings))


def num_siblings(siblings: Path = SIBLINGS) -> int:
    """Return how many hardware threads a core has."""
    return max(1, _count(siblings))


def _count(file: Path) -> int:
    """Count the numbers in a list such as ``0-3,8``; 0 where there is none."""
    try:
        parts = [part.split("-") for part in file.read_text().strip().split(",")]
        return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in parts)
    except (OSError, ValueError):
        return 0


def _words(folder: Path) -> list[str]:
    """Read limit and period in microseconds; fewer than two words when there is no limit."""
    try:
        if (folder / "cpu.max").exists():
            return (folder / "cpu.max").read_text().split()
        files = (folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        return [file.read_text().strip() for file in files]
    except OSError:
        return []
