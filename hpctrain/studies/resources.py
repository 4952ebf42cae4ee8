"""Resources that the ranks of a repeat used, computed from their samples of counters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from hpctrain.cluster.counters import CRAY
from hpctrain.core.records import read

MIN_S = 0.5  # shortest time for a rate, because processor time is counted in steps of 0.01 s


@dataclass(frozen=True)
class RankSamples:
    """Samples of a rank's counters during the measured steps.

    The last sample before these steps and the first sample after these steps are included.
    """

    host: str
    samples: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path, begin: float, end: float) -> "RankSamples":
        """Read the samples of a rank that cover the time from ``begin`` to ``end``.

        ``path`` is the file of the rank. The times are seconds of the clock of this rank.
        """
        every = read(path, key="sampled_at")
        before = sum(each["sampled_at"] <= begin for each in every)
        until = sum(each["sampled_at"] < end for each in every)
        return cls(path.stem.rpartition("-")[0], every[max(before - 1, 0) : until + 1])

    def values(self, name: str) -> list[Any]:
        """Return the value of a counter in each sample; empty if a sample lacks the counter."""
        found = [each.get(name) for each in self.samples]
        return [] if None in found else found

    def last(self, name: str) -> Any:
        """Return the last value of a counter; None if a sample lacks the counter."""
        return next(iter(self.values(name)[::-1]), None)

    def mean(self, name: str) -> float | None:
        """Return the mean of a counter over the samples; None if a sample lacks the counter."""
        values = self.values(name)
        return fmean(values) if values else None

    def rate(self, name: str) -> float | None:
        """Return the growth of a counter per second.

        The result is None if a sample lacks the counter, or if the time is shorter than ``MIN_S``.
        """
        values = self.values(name)
        if not values:
            return None
        passed_s = self.samples[-1]["sampled_at"] - self.samples[0]["sampled_at"]
        return None if passed_s < MIN_S else float(values[-1] - values[0]) / passed_s


def resources_of(ranks: Sequence[RankSamples], mean_step_s: float) -> dict[str, Any]:
    """Return the fields of ``ResourceRecord`` and ``HostRecord`` that the samples determine."""
    read_rate, written_rate = (
        _sum(each.rate(name) for each in ranks) for name in ("read_total", "written_total")
    )
    found = {
        "gpu": next((name for each in ranks if (name := each.last("gpu"))), None),
        "gpu_busy": _mean(each.mean("gpu_busy") for each in ranks),
        "gpu_memory_bytes": _max(_max(each.values("gpu_memory_bytes")) for each in ranks),
        "host_memory_bytes": _max(each.last("host_memory_bytes") for each in ranks),
        "read_bytes": None if read_rate is None else read_rate * mean_step_s,
        "written_bytes": None if written_rate is None else written_rate * mean_step_s,
        "mhz": _mean(each.mean("mhz") for each in ranks),
        "other_cores": _max(_other_cores(each) for each in _by_host(ranks)),
        **_power(ranks),
    }
    return {name: value for name, value in found.items() if value is not None}


def _power(ranks: Sequence[RankSamples]) -> dict[str, Any]:
    """Return the fields ``power_w`` and ``power_source``; empty if no power was measured."""
    nodes = [each[0] for each in _by_host(ranks)]  # all ranks of a node read the same counter
    watts = _sum(each.rate("node_joules") for each in nodes)
    sources = {each.last("node_source") for each in nodes} if watts is not None else set()
    powered = [each for each in ranks if any("gpu_w" in sample for sample in each.samples)]
    if powered and sources != {CRAY}:  # Cray's counter includes the GPUs
        gpus = {(each.host, each.last("gpu_id")): each.mean("gpu_w") for each in powered}
        watts = _sum([watts or 0.0, *gpus.values()])
        sources |= {each.last("gpu_source") for each in powered}
    if watts is None:
        return {}
    return {"power_w": watts, "power_source": " and ".join(sorted(map(str, sources)))}


def _other_cores(ranks: Sequence[RankSamples]) -> float | None:
    """Return how many cores of a host, on average, were used by processes other than ranks."""
    busy, used = _mean(each.rate("busy_s") for each in ranks), _sum(e.rate("cpu_s") for e in ranks)
    return None if busy is None or used is None else max(busy - used, 0.0)


def _by_host(ranks: Sequence[RankSamples]) -> list[list[RankSamples]]:
    ordered = sorted(ranks, key=lambda each: each.host)
    return [list(found) for _, found in groupby(ordered, key=lambda each: each.host)]


def _known(values: Iterable[float | None]) -> list[float]:
    """Return the values; empty if one of them is unknown."""
    found = list(values)
    return [each for each in found if each is not None] if None not in found else []


def _sum(values: Iterable[float | None]) -> float | None:
    return sum(known) if (known := _known(values)) else None


def _mean(values: Iterable[float | None]) -> float | None:
    return fmean(known) if (known := _known(values)) else None


def _max(values: Iterable[float | None]) -> float | None:
    return max(known) if (known := _known(values)) else None
