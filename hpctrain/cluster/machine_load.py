"""Load of this machine by other processes: load average, processor time, clock rates."""

import os
import re
import resource
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

PROC, CPU = Path("/proc"), Path("/sys/devices/system/cpu")

BUSY = 0.1  # fraction of the cores above which other processes disturb measurements

LOAD_S = 0.3  # time for which the load is measured before a program starts

_SENSORS = ("coretemp", "k10temp", "zenpower")  # names of drivers of sensors in processors

_IDLE = (3, 4)  # columns of /proc/stat, after the name: idle, and wait for a disk


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLoad:
    """Load of this machine during a measurement, by the measured and by other programs."""

    cores: int  # number of cores of the machine
    load: float  # load average of the last minute
    own_cores: float  # mean number of cores that the program used
    other_cores: float  # mean number of cores that other processes used
    mhz: float | None  # mean clock rate of the cores at the end; None if unknown
    celsius: float | None = None  # highest temperature of the processors at the end
    num_throttled: int | None = None  # how often heat made the processors lower their clock rate

    @property
    def is_busy(self) -> bool:
        """Whether other processes disturb measured times."""
        return self.other_cores > BUSY * self.cores

    @property
    def fault(self) -> str:
        """Text of the rule that this load breaks; empty if the machine is not busy."""
        what = f"the node must be idle for measurements, but {self.describe()}"
        return what if self.is_busy else ""

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
        self._since = time.monotonic(), busy_s(proc), own_s()
        self._throttled = _num_throttled(cpu)

    def read(self) -> MachineLoad | None:
        """Return the load since the start; None if the system does not report it."""
        (start, before_s, own_before_s), now_s = self._since, busy_s(self._proc)
        passed_s = time.monotonic() - start
        if before_s is None or now_s is None or passed_s <= 0:
            return None
        throttled = _num_throttled(self._cpu)
        own = (own_s() - own_before_s) / passed_s
        return MachineLoad(
            cores=os.cpu_count() or 1,
            load=os.getloadavg()[0],
            own_cores=own,
            other_cores=max((now_s - before_s) / passed_s - own, 0.0),
            mhz=_mhz(self._proc, self._cpu),
            celsius=_celsius(self._cpu.parents[2]),
            num_throttled=None if throttled is None else throttled - (self._throttled or 0),
        )


def measured_for(seconds: float) -> MachineLoad | None:
    """Return the load of this machine while this process sleeps for some seconds."""
    meter = LoadMeter()
    time.sleep(seconds)
    return meter.read()


def busy_s(proc: Path = PROC) -> float | None:
    """Return the sum of the busy seconds of all cores since the boot; None if unknown."""
    try:
        words = (proc / "stat").read_text().partition("\n")[0].split()[1:9]
        ticks = [int(word) for n, word in enumerate(words) if n not in _IDLE]
    except (OSError, ValueError):
        return None
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Return the processor time in seconds of this process and of its ended children."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _num_throttled(cpu: Path) -> int | None:
    """Return how often the cores were throttled since the boot; None if unknown."""
    files = cpu.glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
    try:
        counts = [int(file.read_text()) for file in files]
    except (OSError, ValueError):
        return None
    return sum(counts) if counts else None


def _celsius(sys: Path) -> float | None:
    """Return the highest temperature of the sensors of the processors; None if unknown."""
    found = []
    for name in sys.glob("class/hwmon/hwmon*/name"):
        with suppress(OSError, ValueError):
            if name.read_text().strip() in _SENSORS:
                files = name.parent.glob("temp*_input")
                found += [int(file.read_text()) / 1000 for file in files]
    return max(found, default=None)


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
