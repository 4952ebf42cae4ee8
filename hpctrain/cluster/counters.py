"""Counters of a process and its node: memory, input and output, processor time and energy.

A counter that does not exist, or that this user may not read, is absent from the samples.
"""

import os
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.cluster.gpu_counters import amd_gpu, nvidia_gpu
from hpctrain.cluster.machine_load import busy_s, own_s

ROOT = Path("/")  # prefix of /proc and /sys

CRAY, RAPL = "Cray pm_counters", "RAPL"
"""Sources of ``node_joules``: the whole node with its GPUs, or processors and their memory."""

_TICKS = os.sysconf("SC_CLK_TCK")

Counter = Callable[[], Mapping[str, Any]]
"""Function that returns the present values of counters by name."""


class Counters:
    """Samples all readable counters of this process and its node.

    Args:
        root: prefix of ``/proc`` and ``/sys``, for tests.
    """

    def __init__(self, root: Path | None = None) -> None:
        root = root or ROOT
        every = (
            lambda: _of_process(root),
            lambda: _of_clock(root),
            _cray(root),
            _rapl(root),
            nvidia_gpu(),
            amd_gpu(root),
        )
        self._counters: list[Counter] = [each for each in every if each is not None]

    def read(self) -> dict[str, Any]:
        """Return the present values; ``sampled_at`` is the monotonic time.

        ``host_memory_bytes``: peak resident memory; ``read_total`` and ``written_total``: bytes
        that system calls have read and written; ``cpu_s``: processor time of this process and its
        children; ``busy_s``: processor time of all processes of the node; ``mhz``: clock rate of a
        core of this process; ``node_joules`` and ``node_source``: energy of the node; ``gpu``,
        ``gpu_id``, ``gpu_busy``, ``gpu_memory_bytes``, ``gpu_w`` and ``gpu_source``: state of the
        GPU of this rank.
        """
        found: dict[str, Any] = {"sampled_at": time.monotonic()}
        for counter in self._counters:
            with suppress(OSError, ValueError, LookupError):
                found |= counter()
        return found


def _of_process(root: Path) -> Mapping[str, Any]:
    found: dict[str, Any] = {
        "host_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "cpu_s": own_s() + _children_s(root),
        "busy_s": busy_s(root / "proc"),
    }
    lines = (root / "proc/self/io").read_text().splitlines()
    values = dict(line.split(": ") for line in lines)
    return found | {"read_total": int(values["rchar"]), "written_total": int(values["wchar"])}


def _children_s(root: Path) -> float:
    """Return the processor time of running children, such as the workers of a data loader."""
    pid, ticks = os.getpid(), 0
    with suppress(OSError):
        for child in (root / f"proc/self/task/{pid}/children").read_text().split():
            with suppress(OSError):  # a child may end meanwhile
                words = (root / f"proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += int(words[11]) + int(words[12])
    return ticks / _TICKS


def _of_clock(root: Path) -> Mapping[str, Any]:
    core = min(os.sched_getaffinity(0))  # one core: reading its clock interrupts a core
    file = root / f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq"
    return {"mhz": int(file.read_text()) / 1000}


def _cray(root: Path) -> Counter | None:
    file = root / "sys/cray/pm_counters/energy"
    if not file.exists():
        return None
    return lambda: {"node_joules": float(file.read_text().split()[0]), "node_source": CRAY}


def _rapl(root: Path) -> Counter | None:
    """Return the counter of the energy of all processor packages and their memory."""
    if (root / "sys/cray/pm_counters/energy").exists():  # this counter includes the processors
        return None
    zones = []
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        with suppress(OSError):
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                (zone / "energy_uj").read_text()  # readable by root only on many systems
                zones.append(zone)
    if not zones:
        return None
    last, joules = dict.fromkeys(zones, -1), 0.0

    def read() -> Mapping[str, Any]:
        nonlocal joules
        for zone in zones:
            now, before = int((zone / "energy_uj").read_text()), last[zone]
            if before >= 0:
                wrapped = int((zone / "max_energy_range_uj").read_text()) if now < before else 0
                joules += (now - before + wrapped) / 1e6
            last[zone] = now
        return {"node_joules": joules, "node_source": RAPL}

    return read
