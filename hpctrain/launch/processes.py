"""What /proc says of the processes below mpirun: who lives, and which stop when asked."""

import contextlib
import signal
from pathlib import Path

from hpctrain.launch.hydra_wrapper import is_guard

RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK", b"PMIX_RANK")
"""Launchers say to a rank by one of these which it is; their own processes have none."""


def stop_when_asked(pid: int) -> bool:
    """Say whether all ranks below ``pid``, on this host, handle SIGUSR1, and SIGTERM as well.

    Who catches both has a way to stop in its own time. To any other program SIGUSR1 is the end,
    or a question of another kind.
    """
    ranks: dict[bytes, bool] = {}
    for below in descendants(pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{below}/environ").read_bytes().split(b"\0")
            variables = dict(word.partition(b"=")[::2] for word in words)
            rank = next((variables[name] for name in RANK_VARIABLES if name in variables), None)
            if rank is not None and not is_guard(Path(f"/proc/{below}/cmdline").read_bytes()):
                caught = catches(below)
                is_willing = {signal.SIGUSR1, signal.SIGTERM} <= caught
                ranks[rank] = ranks.get(rank, False) or is_willing
    return bool(ranks) and all(ranks.values())


def catches(pid: int) -> set[int]:
    """Return the numbers of the signals that a process handles itself.

    Raises:
        OSError: there is no such process, or no /proc.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return {number for number in range(1, mask.bit_length() + 1) if mask >> (number - 1) & 1}


def has_only_dead_children(pid: int) -> bool:
    """Say whether a process has children that ended, and none that lives."""
    children: list[str] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += listed.read_text().split()
    states = set()
    for child in children:
        with contextlib.suppress(OSError):
            states.add(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0])
    return bool(states) and states <= {"Z", "X"}


def descendants(pid: int) -> list[int]:
    """List the living processes below ``pid``, deepest last; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold blanks: the parent is the second word after it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found
