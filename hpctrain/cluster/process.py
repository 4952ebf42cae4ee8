"""This process: which one it is, in words that mean the same to others."""

import builtins
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_NAME = Path("/proc/self/comm")
JOINING, LEAVING = IN_MPI = "in MPI_Init", "in MPI_Finalize"
"""Names of a process while it waits there for all others."""


class ProcessIdentity(NamedTuple):
    """A process id, and where it is one."""

    pid: int
    namespace: tuple[str, int]
    """Processes with the same value see each other under their ids; a container has its own."""


def identity() -> ProcessIdentity:
    """Return the identity of this process; where there is no /proc it sees nobody."""
    try:
        namespace = (_BOOT.read_text().strip(), _NAMESPACE.stat().st_ino)
    except OSError:
        namespace = ("", os.getpid())
    return ProcessIdentity(os.getpid(), namespace)


def is_interactive() -> bool:
    """Say whether a person types into this process: a Python prompt or a notebook."""
    return hasattr(sys, "ps1") or hasattr(builtins, "get_ipython")


def is_child() -> bool:
    """Say whether multiprocessing has started this process, or a server for such processes.

    That holds already while it imports the program's main module.
    """
    process = multiprocessing.current_process()
    return multiprocessing.parent_process() is not None or hasattr(process, "_inheriting")


@contextmanager
def named(name: str) -> Iterator[None]:
    """Let this process have another name inside, of 15 characters at most, for who looks at it."""
    try:
        before = _NAME.read_bytes().removesuffix(b"\n")  # is no part of it
        _NAME.write_text(name)
    except OSError:  # no /proc
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            _NAME.write_bytes(before)


def rename(name: str) -> None:
    """Let this process have another name, of 15 characters at most, for who looks at it."""
    with suppress(OSError):  # no /proc
        _NAME.write_text(name)


def name_of(pid: int) -> str:
    """Return the name of a process; empty where there is none, or no /proc."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


STOPPED = ("T", "t")
"""States of processes that do nothing: by a signal such as SIGSTOP, or by a debugger."""


class Stat(NamedTuple):
    """What /proc says of a process."""

    state: str  # ``Z`` and ``X`` are no longer alive
    parent: int
    birth: int  # when it started, in clock ticks since boot


def stat(pid: int) -> Stat | None:
    """Ask for a process; None where there is none, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, parent, *fields = text[text.rindex(")") + 2 :].split()  # the name may hold anything
    return Stat(state, int(parent), int(fields[17]))


def birth(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is no longer alive."""
    found = stat(pid)
    return None if found is None or found.state in ("Z", "X") else found.birth
