"""Identity, name and state of processes."""

import builtins
import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_NAME = Path("/proc/self/comm")
JOINING, LEAVING = IN_MPI = "in MPI_Init", "in MPI_Finalize"
"""Names of a process while it waits for all other processes in one of these MPI calls."""


class ProcessIdentity(NamedTuple):
    """Process id with the namespace in which the id is valid."""

    pid: int
    namespace: tuple[str, int]
    """Processes with equal namespaces can address each other by id; a container has its own."""


def identity() -> ProcessIdentity:
    """Return the identity of this process; without /proc, its namespace is unique."""
    try:
        namespace = (_BOOT.read_text().strip(), _NAMESPACE.stat().st_ino)
    except OSError:
        namespace = ("", os.getpid())
    return ProcessIdentity(os.getpid(), namespace)


def is_interactive() -> bool:
    """Return True in an interactive process: a Python prompt or a notebook."""
    return hasattr(sys, "ps1") or hasattr(builtins, "get_ipython")


def is_child() -> bool:
    """Return True if multiprocessing started this process, also in its server processes.

    The result is also True while the process imports the main module of the program.
    """
    process = multiprocessing.current_process()
    return multiprocessing.parent_process() is not None or hasattr(process, "_inheriting")


@contextmanager
def named(name: str) -> Iterator[None]:
    """Rename this process inside the block; at most 15 characters."""
    before = name_of(os.getpid())
    rename(name)
    try:
        yield
    finally:
        rename(before)


def rename(name: str) -> None:
    """Rename this process, as other processes see it; at most 15 characters."""
    with suppress(OSError):  # no /proc
        _NAME.write_text(name)


def name_of(pid: int) -> str:
    """Return the name of a process; empty if it does not exist, or without /proc."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


_claims: list[socket.socket] = []


def is_first(what: str) -> bool:
    """Return True in the first process of this host that calls this function with ``what``.

    Only processes with the same parent are compared. These are the ranks of a launch on this host,
    unless a separate script starts each rank. Later calls return False until the first process has
    ended.
    """
    claim = claimed(what)
    if claim is not None:
        _claims.append(claim)  # open until the process ends
    return claim is not None


def claimed(what: str) -> socket.socket | None:
    """Claim ``what`` among the processes with the same parent; return a socket, or None if taken.

    The claim lasts until the socket is closed. The name of the socket is in the abstract namespace
    of Linux, so no file remains.
    """
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        found.bind(f"\0hpctrain {os.getuid()} {os.getppid()} {what}")
    except OSError:  # in use
        found.close()
        return None
    return found


STOPPED = ("T", "t")
"""States of stopped processes: by a signal such as SIGSTOP, or by a debugger."""


class Stat(NamedTuple):
    """State of a process, from /proc."""

    state: str  # one letter; ``Z`` and ``X`` are states of processes that have ended
    parent: int
    birth: int  # start time in clock ticks since boot


def stat(pid: int) -> Stat | None:
    """Return the state of a process; None if it does not exist, or without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, parent, *fields = text[
        text.rindex(")") + 2 :
    ].split()  # the name may contain any characters
    return Stat(state, int(parent), int(fields[17]))


def birth(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it has ended."""
    found = stat(pid)
    return None if found is None or found.state in ("Z", "X") else found.birth
