"""Cores of this host that the job may use, bound or not."""

import os
from collections.abc import Mapping
from pathlib import Path

from hpctrain.cluster import cores, env
from hpctrain.cluster.cgroups import CGROUPS, MEMBERSHIP, folders

SIBLINGS = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")


def num_granted(
    environ: Mapping[str, str] | None = None,
    root: Path = CGROUPS,
    membership: Path = MEMBERSHIP,
    siblings: Path = SIBLINGS,
) -> int:
    """Count the cores, not their hardware threads, that the job has on this host.

    Slurm tells; other schedulers are taken at what the mask says; without one all cores of the
    container or the machine count. A virtual node may claim more than there are.
    """
    environ = os.environ if environ is None else environ
    there = min([os.cpu_count() or 1, *_cpusets(root, membership)])
    told = environ.get("SLURM_CPUS_ON_NODE", "")
    if told.isdigit():
        there = min(int(told), there)
    elif env.scheduler(environ):
        there = min(len(cores.affinity()), there)
    return max(1, there // num_siblings(siblings))


def num_siblings(siblings: Path = SIBLINGS) -> int:
    """Return how many hardware threads a core has."""
    return max(1, _count(siblings))


def _cpusets(root: Path, membership: Path) -> list[int]:
    files = ("cpuset.cpus.effective", "cpuset.effective_cpus")  # versions 2 and 1
    found = [
        _count(folder / file) for folder in folders("cpuset", root, membership) for file in files
    ]
    return [number for number in found if number]


def _count(file: Path) -> int:
    """Count the numbers in a list such as ``0-3,8``; 0 where there is none."""
    try:
        parts = [part.split("-") for part in file.read_text().strip().split(",")]
        return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in parts)
    except (OSError, ValueError):
        return 0
