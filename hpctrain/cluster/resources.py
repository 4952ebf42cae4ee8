"""Resources of this process, its job and its container: cores, memory, network adapters."""

import math
import os
import resource
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpctrain.cluster import env
from hpctrain.core.units import format_bytes, parse_numbers

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[Path]:
    """Return the folders of the control group of this process and of its parent groups.

    The limits of all these groups apply.

    Args:
        controller: name in version 1 of control groups, such as ``cpu`` or ``memory``; version 2
            has one tree for all controllers.
        root: mount point of the control groups.
        membership: file with the groups of this process.
    """
    found = []
    lines = membership.read_text().splitlines() if membership.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "" or controller in controllers.split(","):
            base = root / controllers
            own = base / path.lstrip("/")
            found += [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return found


SIBLINGS = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")


def affinity() -> tuple[int, ...]:
    """Return the hardware threads of the affinity mask, sorted."""
    return tuple(sorted(os.sched_getaffinity(0)))


def quota(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Return the CPU time that the control groups allow, in cores; None if unlimited.

    All processes of the container share the quota. A limit of any parent group applies.
    """
    limits = [
        int(words[0]) / int(words[1])
        for folder in folders("cpu", root, membership)
        if len(words := _words(folder)) == 2 and words[0].isdigit() and int(words[1]) > 0
    ]
    return min(limits, default=None)


def num_granted(
    environ: Mapping[str, str] = os.environ,
    root: Path = CGROUPS,
    membership: Path = MEMBERSHIP,
    siblings: Path = SIBLINGS,
) -> int:
    """Return the number of cores of the job on this host; hardware threads do not count.

    In a job of Slurm, the number is read from a variable. In a job of another scheduler, the
    function counts the cores in the affinity mask; outside of jobs, the cores of the container or
    the machine. The result is at most the number of cores that exist, because virtual nodes may
    claim more.
    """
    files = ("cpuset.cpus.effective", "cpuset.effective_cpus")  # versions 2 and 1
    sets = [
        _count(folder / file) for folder in folders("cpuset", root, membership) for file in files
    ]
    there = min([os.cpu_count() or 1, *filter(None, sets)])
    granted = env.slurm("cpus_on_node", environ)
    if granted.isdigit():
        there = min(int(granted), there)
    elif env.scheduler(environ):
        there = min(len(affinity()), there)
    return max(1, there // num_siblings(siblings))


def num_siblings(siblings: Path = SIBLINGS) -> int:
    """Return the number of hardware threads of a core."""
    return max(1, _count(siblings))


def _count(file: Path) -> int:
    """Return the number of elements of a list such as ``0-3,8``; 0 if the file does not exist."""
    return len(parse_numbers(text_of(file)))


def _words(folder: Path) -> list[str]:
    """Return the CPU limit and its period in microseconds; an empty list without limit files."""
    try:
        if (folder / "cpu.max").exists():
            return (folder / "cpu.max").read_text().split()
        files = (folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        return [file.read_text().strip() for file in files]
    except OSError:
        return []


_FILES = (
    # Version 2, then version 1: limit, usage, pages of files, pages not yet written.
    (
        "memory.max",
        "memory.current",
        ("active_file", "inactive_file"),
        ("file_dirty", "file_writeback"),
    ),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
        ("total_dirty", "total_writeback"),
    ),
)
NO_LIMIT = 1 << 62  # version 1 has a number close to 2**63 for no limit, version 2 "max"
SPARE_BYTES = 8 << 20
"""Reserve per process for other allocations, which would otherwise start the OOM killer."""
ENTRY_FACTOR = 512  # a page of 4 KiB takes 8 bytes in the page table of every process that maps it


class Room(NamedTuple):
    """Memory limit of a machine or control group, with the available bytes."""

    key: tuple[int, int]  # equal in all processes to which the limit applies, in any namespace
    name: str
    left_bytes: int


def rooms(
    meminfo: Path = Path("/proc/meminfo"), root: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> list[Room]:
    """Return the memory limits of this process: machine, control group, parents of the group."""
    found = [_machine(meminfo)]
    for folder in folders("memory", root, membership):
        found += [_group(folder, *names) for names in _FILES]
    return [room for room in found if room is not None]


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), root: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> int | None:
    """Return the available bytes; None if the system does not report them."""
    return min((room.left_bytes for room in rooms(meminfo, root, membership)), default=None)


def shortage(rooms_of_ranks: Sequence[Iterable[Room]], num_bytes: int) -> str | None:
    """Return an error text if a node has too little memory for shared segments of its ranks.

    Each rank allocates a segment, and needs a page table for the segments of all ranks.

    Args:
        rooms_of_ranks: memory limits of each rank, measured before the first rank allocates.
        num_bytes: size of the segment of a rank.

    Returns:
        The text; None if there is enough memory.
    """
    each_bytes = num_bytes + num_bytes * len(rooms_of_ranks) // ENTRY_FACTOR + SPARE_BYTES
    shared: dict[tuple[int, int], list[Room]] = {}
    for mine in rooms_of_ranks:
        for room in mine:
            shared.setdefault(room.key, []).append(room)
    for same in shared.values():
        left_bytes = min(room.left_bytes for room in same)
        if each_bytes * len(same) > left_bytes:
            needed_bytes, more_bytes = num_bytes * len(same), (each_bytes - num_bytes) * len(same)
            return (
                f"a node must have {format_bytes(needed_bytes)} for the shared memory of its "
                f"ranks ({len(same)} x {format_bytes(num_bytes)}) and {format_bytes(more_bytes)} "
                f"for page tables and other allocations, but {same[0].name} has "
                f"{format_bytes(left_bytes)} available; start fewer ranks per node, or request "
                "more memory"
            )
    return None


def _machine(meminfo: Path) -> Room | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else Room((0, 0), "this machine", int(kib) * 1024)


def _group(
    folder: Path, limit: str, usage: str, files: Iterable[str], unwritten: Iterable[str]
) -> Room | None:
    """Return the available memory of a control group, including pages that can be dropped."""
    try:
        allowed = (folder / limit).read_text().strip()
        if not allowed.isdigit() or int(allowed) >= NO_LIMIT:
            return None
        status, used = folder.stat(), int((folder / usage).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        sizes = {name: int(size) for name, size in (line.split() for line in lines)}
    except (OSError, ValueError):
        return None
    in_files = sum(sizes.get(name, 0) for name in files)
    droppable = max(0, in_files - sum(sizes.get(name, 0) for name in unwritten))
    left_bytes = max(0, int(allowed) - used + droppable)
    return Room((status.st_dev, status.st_ino), f"the control group {folder}", left_bytes)


def limits(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> dict[str, float]:
    """Return the soft and hard limit of open files, and the limit of threads; infinite if none.

    The limit of threads is the lower of the limits of the user and of the container.
    """
    files, most_files = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    of_user = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]) if os.geteuid() else math.inf
    texts = (text_of(folder / "pids.max") for folder in folders("pids", root, membership))
    threads = min([of_user, *(int(text) for text in texts if text.isdigit())])
    return {"files": files, "most_files": most_files, "threads": threads}


def _limit(number: int) -> float:
    return math.inf if number == resource.RLIM_INFINITY else number


CLASSES = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))
"""The first folder lists adapters of InfiniBand, RoCE and Omni-Path, the second of Slingshot."""


def num_cards(classes: tuple[Path, ...] = CLASSES) -> int:
    """Return the number of fast network adapters with an active port; 1 (Ethernet) if none."""
    return max(1, len(live_adapters(classes)))


def live_adapters(classes: tuple[Path, ...] = CLASSES) -> list[Path]:
    """Return the folders of the fast network adapters with an active port, by name."""
    cards = [card for folder in classes if folder.exists() for card in folder.iterdir()]
    return sorted(filter(_is_live, cards))


NETWORK = Path("/sys/class/net")


def links(classes: tuple[Path, ...] = CLASSES, network: Path = NETWORK) -> dict[str, str]:
    """Return the active network devices of this host by name, with the rates of their ports."""
    found = {}
    for card in live_adapters(classes):
        rates = [text_of(path) for path in sorted(card.glob("ports/*/rate"))]
        found[card.name] = ", ".join(filter(None, rates)) or "unknown"
    for device in sorted(network.glob("*/device")):
        speed = text_of(device.parent / "speed")  # -1 if the device does not report a speed
        if text_of(device.parent / "operstate") == "up":
            found[device.parent.name] = f"{speed} Mbit/s" if speed.isdigit() else "unknown"
    return found


def text_of(path: Path) -> str:
    """Return the text of a file of the kernel; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _is_live(card: Path) -> bool:
    """Return whether a port is active; True for an adapter that lists no ports."""
    states = list(card.glob("ports/*/state"))
    return not states or any("ACTIVE" in state.read_text() for state in states)
