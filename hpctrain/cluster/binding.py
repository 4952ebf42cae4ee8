"""Cores of the ranks of a node: the cores next to the GPU of each rank, or equal shares.

A rank that its launcher has already bound to cores keeps this binding.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.cluster.env import Launched, visible_devices
from hpctrain.cluster.resources import text_of
from hpctrain.cluster.topology import RankFacts
from hpctrain.core.units import parse_numbers

SYS = Path("/sys")
THREADS = Path("/proc/self/task")  # a folder for each thread of this process

_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # display, 3D and processing accelerators


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlace:
    """A GPU on the PCI bus."""

    vendor: str  # ``amd`` or ``nvidia``
    cores: tuple[int, ...] = ()  # hardware threads next to the GPU; empty if unknown


def gpu_places(sys: Path = SYS) -> list[GpuPlace]:
    """Return the GPUs of this machine in the order of their PCI addresses."""
    found = []
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        vendor = _VENDORS.get(text_of(device / "vendor"))
        if vendor and text_of(device / "class").startswith(_CLASSES):
            cores = tuple(parse_numbers(text_of(device / "local_cpulist")))
            found.append(GpuPlace(vendor=vendor, cores=cores))
    return found


def gpu_of(local_rank: int, num_gpus: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the index of a rank's GPU, or its name in CUDA_VISIBLE_DEVICES; empty without GPU."""
    names = [word.strip() for word in visible_devices(environ).split(",") if word.strip()]
    names = names or [str(number) for number in range(num_gpus)]
    return names[local_rank % len(names)] if names else ""


def share_of(
    launched: Launched | None,
    mask: Iterable[int],
    environ: Mapping[str, str] = os.environ,
    *,
    sys: Path = SYS,
) -> tuple[int, ...]:
    """Return the hardware threads that a rank of this node may be bound to; empty if none.

    Ranks whose GPUs have the same cores next to them divide these cores. If the cores of a GPU are
    unknown, all ranks divide the cores in ``mask``, by NUMA domain. A core is never divided.
    """
    if launched is None or launched.local_rank is None or (launched.local_size or 1) == 1:
        return ()
    own, places = {*mask}, gpu_places(sys)
    names = [gpu_of(rank, len(places), environ) for rank in range(launched.local_size or 1)]
    known = {str(number): own & {*place.cores} for number, place in enumerate(places)}
    near = [frozenset(known.get(name, ())) for name in names]
    distinct = {*near}
    if not all(near) or sum(map(len, distinct)) > len(frozenset().union(*distinct)):
        near = [frozenset(own)] * len(near)
    mine = near[launched.local_rank]
    return _part(
        _cores(mine, sys),
        near[: launched.local_rank].count(mine),
        near.count(mine),
    )


def _part(cores: Sequence[tuple[int, ...]], index: int, count: int) -> tuple[int, ...]:
    """Return the hardware threads of one of ``count`` parts; empty if there are too few cores."""
    if len(cores) < count:
        return ()
    ends = (len(cores) * at // count for at in (index, index + 1))
    return tuple(sorted(thread for core in cores[slice(*ends)] for thread in core))


def _cores(mask: Iterable[int], sys: Path) -> list[tuple[int, ...]]:
    """Return the hardware threads of each core; cores are sorted by NUMA domain and thread."""
    domains = {
        thread: int(folder.name.removeprefix("node"))
        for folder in (sys / "devices/system/node").glob("node[0-9]*")
        for thread in parse_numbers(text_of(folder / "cpulist"))
    }
    own = {*mask}
    found = set()
    for thread in own:
        file = sys / f"devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
        found.add(tuple(sorted({thread, *parse_numbers(text_of(file))} & own)))
    return sorted(found, key=lambda core: (domains.get(core[0], 0), core))


def bound(facts: Sequence[RankFacts]) -> list[RankFacts]:
    """Return the facts of all ranks after each rank without a binding is bound to its share.

    A pure function: all ranks compute the same result from the same facts. A rank has no binding
    if its mask has all cores that ranks of its host use. The masks of a host do not change if the
    shares overlap each other or the masks of other ranks.
    """
    found = list(facts)
    hosts: dict[str, list[int]] = {}
    for rank, each in enumerate(facts):
        hosts.setdefault(each.host, []).append(rank)
    for members in hosts.values():
        every = {core for rank in members for core in facts[rank].cores}
        free = [r for r in members if facts[r].share and len({*facts[r].cores}) == len(every)]
        new = {r: facts[r].share if r in free else facts[r].cores for r in members}
        if sum(map(len, new.values())) == len({core for mask in new.values() for core in mask}):
            for rank in free:
                found[rank] = replace(facts[rank], cores=new[rank])
    return found


def bind(cores: Iterable[int], threads: Path = THREADS) -> None:
    """Bind all threads of this process to ``cores``; new threads inherit the binding."""
    for thread in threads.iterdir():
        with suppress(OSError):  # the thread has ended, or the job lost cores
            os.sched_setaffinity(int(thread.name), cores)
