"""The control groups that this process is in: limits of a container or a job."""

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[Path]:
    """List the folders of our control group and its parents, in version 2 and version 1.

    A limit of any of them counts.

    ``controller`` is a name of version 1, such as ``cpu`` or ``memory``; version 2 has one tree.
    """
    found = []
    lines = membership.read_text().splitlines() if membership.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "" or controller in controllers.split(","):
            base = root / controllers
            own = base / path.lstrip("/")
            found += [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return found
