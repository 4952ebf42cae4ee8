"""Memory that a process may still take, by the machine and by its control groups."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hpctrain.cluster.cgroups import CGROUPS, MEMBERSHIP, folders
from hpctrain.core.units import format_bytes

_FILES = (
    # Version 2, then version 1: limit, usage, pages of files, and those of them not yet written.
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
SPARE_BYTES = 8 << 20
"""What a process needs besides, for its next message or list, lest it wakes the OOM killer."""
ENTRY_FACTOR = 512
"""A page of 4 KiB takes 8 bytes in the page table of every process that maps it."""


class Room(NamedTuple):
    """Memory that some processes of a machine take from together."""

    key: tuple[int, int]
    """The same in every process that takes from it, whatever its namespaces."""
    name: str
    left_bytes: int


def rooms(
    meminfo: Path = Path("/proc/meminfo"), root: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> list[Room]:
    """List what this process takes from: the machine, its control group, the group's parents."""
    found = [_machine(meminfo)]
    for folder in folders("memory", root, membership):
        found += [_group(folder, *names) for names in _FILES]
    return [room for room in found if room is not None]


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), root: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> int | None:
    """Return the bytes that are left; None where the system does not tell."""
    return min((room.left_bytes for room in rooms(meminfo, root, membership)), default=None)


def shortage(rooms_of_ranks: Sequence[Iterable[Room]], num_bytes: int) -> str | None:
    """Say which room is too small if every rank of a node takes ``num_bytes`` that all map.

    Every rank pays its own, and its page table of them all; rooms are those from before the
    first rank takes any.
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
                f"the ranks of this node need {format_bytes(needed_bytes)} of shared memory and "
                f"{format_bytes(left_bytes)} are left in {same[0].name}: {len(same)} x "
                f"{format_bytes(num_bytes)}, and {format_bytes(more_bytes)} for page tables and "
                f"what the ranks do besides; start fewer ranks per node, or give the job more"
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
    """Return what a group has left; pages of files that it can drop count as left."""
    try:
        status = folder.stat()
        allowed, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        sizes = {name: int(size) for name, size in (line.split() for line in lines)}
    except (OSError, ValueError):
        return None
    if not allowed.isdigit():  # "max": no limit here
        return None
    in_files = sum(sizes.get(name, 0) for name in files)
    droppable = max(0, in_files - sum(sizes.get(name, 0) for name in unwritten))
    left_bytes = max(0, int(allowed) - used + droppable)
    return Room((status.st_dev, status.st_ino), f"the control group {folder}", left_bytes)
