"""Load of this machine by other processes: load average, processor time, clock rates."""

import os
import re
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

PROC, CPU = Path("/proc"), Path("/sys/devices/system/cpu")

BUSY = 0.1  # fraction of the cores above which other processes disturb measurements

_IDLE = (3, 4)  # columns of /proc/stat, after the name: idle, and wait for a disk


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLoad:
    """Load of this machine during a measurement, by the measured and by other programs."""

    cores: int  # of the machine
    load: float  # load average of the last minute
    own_cores: float  # mean number of cores that the program used
    other_cores: float  # mean number of cores that other processes used
    mhz: float | None  # mean clock rate of the cores at the end; None if unknown

    @property
    def is_busy(self) -> bool:
        """Whether other processes disturb measured times."""
        return self.other_cores > BUSY * self.cores

    def without(self, ranks: Iterable["MachineLoad"]) -> "MachineLoad":
        """Return this load; the cores used by ``ranks`` are subtracted from ``other_cores``."""
        used = sum(each.own_cores for each in ranks)
        return replace(self, other_cores=max(self.other_cores - used, 0.0))

    def describe(self) -> str:
        """Return the load in one human-readable line."""
        clock = f", {self.mhz:.0f} MHz" if self.mhz else ""
        return (
            f"other processes use {self.other_cores:.1f} of {self.cores} cores, load "
            f"{self.load:.1f}{clock}"
        )


class LoadMeter:
    """Measures the load of this machine from the construction on.

    Args:
        proc: folder with ``stat`` and ``cpuinfo``, for tests.
        cpu: folder with the clock rates of the cores, for tests.
    """

    def __init__(self, proc: Path = PROC, cpu: Path = CPU) -> None:
        self._proc, self._cpu = proc, cpu
        self._since = time.monotonic(), _busy_s(proc), _own_s()

    def read(self) -> MachineLoad | None:
        """Return the load since the start; None if the system does not report it."""
        (start, busy_s, own_s), now_s = self._since, _busy_s(self._proc)
        passed_s = time.monotonic() - start
        if busy_s is None or now_s is None or passed_s <= 0:
            return None
        own = (_own_s() - own_s) / passed_s
        return MachineLoad(
            cores=os.cpu_count() or 1,
            load=os.getloadavg()[0],
            own_cores=own,
            other_cores=max((now_s - busy_s) / passed_s - own, 0.0),
            mhz=_mhz(self._proc, self._cpu),
        )


def measured_for(seconds: float) -> MachineLoad | None:
    """Return the load of this machine while this process sleeps for some seconds."""
    meter = LoadMeter()
    time.sleep(seconds)
    return meter.read()


def _busy_s(proc: Path) -> float | None:
    """Return the sum of the busy seconds of all cores since the boot; None if unknown."""
    try:
        words = (proc / "stat").read_text().partition("\n")[0].split()[1:9]
        ticks = [int(word) for n, word in enumerate(words) if n not in _IDLE]
    except (OSError, ValueError):
        return None
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Return the processor time in seconds of this process and of its ended children."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _mhz(proc: Path, cpu: Path) -> float | None:
    try:
        files = sorted(cpu.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
        rates = [int(file.read_text()) / 1000 for file in files]
        if not rates:
            text = (proc / "cpuinfo").read_text()
            rates = [
                float(each) for each in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)
            ]
    except (OSError, ValueError):
        return None
    return fmean(rates) if rates else None
