"""How much memory this process may still take, by the machine and by its control group."""

from pathlib import Path

_LIMITS = (
    ("memory.max", "memory.current"),  # cgroup version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the bytes that are left; None where the system does not tell."""
    found = [left for left in (_machine(meminfo), _control_group(cgroups)) if left is not None]
    return min(found, default=None)


def _machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else int(kib) * 1024


def _control_group(cgroups: Path) -> int | None:
    for limit, usage in _LIMITS:
        try:
            allowed, used = (cgroups / limit).read_text(), (cgroups / usage).read_text()
        except OSError:
            continue
        if allowed.strip().isdigit():
            return max(0, int(allowed) - int(used))
    return None
