"""Which process this is, in words that mean the same to others."""

import os
from pathlib import Path
from typing import NamedTuple

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


class Identity(NamedTuple):
    """A process id, and where it is one."""

    pid: int
    namespace: tuple[str, int]
    """Processes with the same value see each other under their ids; a container has its own."""


def identity() -> Identity:
    """Return the identity of this process; where there is no /proc it sees nobody."""
    try:
        namespace = (_BOOT.read_text().strip(), _NAMESPACE.stat().st_ino)
    except OSError:
        namespace = ("", os.getpid())
    return Identity(os.getpid(), namespace)
