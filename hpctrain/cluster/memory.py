"""How much memory this process may still take, by the machine and by its control groups."""

from pathlib import Path

from hpctrain.cluster.cgroups import CGROUPS, MEMBERSHIP, folders

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),  # version 2
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
)


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), root: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> int | None:
    """Return the bytes that are left; None where the system does not tell."""
    left = [_machine(meminfo)]
    for folder in folders("memory", root, membership):
        left += [_group(folder, *names) for names in _FILES]
    return min((num_bytes for num_bytes in left if num_bytes is not None), default=None)


def _machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else int(kib) * 1024


def _group(folder: Path, limit: str, usage: str, inactive: str) -> int | None:
    """Return what a group has left; pages of files that it can drop count as left."""
    try:
        allowed, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        statistics = dict(
            line.split() for line in (folder / "memory.stat").read_text().splitlines()
        )
    except (OSError, ValueError):
        return None
    if not allowed.isdigit():  # "max": no limit here
        return None
    return max(0, int(allowed) - used + int(statistics.get(inactive, 0)))
