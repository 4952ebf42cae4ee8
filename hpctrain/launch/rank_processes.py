"""Descendants of mpirun on this host: ranks, their signal handlers, and missing ranks."""

import contextlib
import os
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hpctrain.cluster.process import IN_MPI, JOINING, birth, name_of, stat
from hpctrain.cluster.process import STOPPED as STOPPED_STATES
from hpctrain.core.units import format_ranks
from hpctrain.launch.mpiexec import is_guard
from hpctrain.launch.stderr import write_line

RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK", b"PMIX_RANK")
"""Variables in which launchers set the rank of a process; launcher processes have none."""


def can_stop_on_request(pid: int) -> bool:
    """Return True if all ranks that descend from ``pid`` handle SIGUSR1 and SIGTERM.

    A program that handles both signals can stop at a point of its choice. Other programs end when
    they receive SIGUSR1, or use this signal for another purpose.
    """
    ranks: dict[bytes, bool] = {}
    for each, rank, _ in _ranks(descendants(pid)):
        with contextlib.suppress(OSError):
            can_stop = {signal.SIGUSR1, signal.SIGTERM} <= catches(each)
            ranks[rank] = ranks.get(rank, False) or can_stop
    return bool(ranks) and all(ranks.values())


def _ranks(pids: Iterable[int]) -> Iterator[tuple[int, bytes, Mapping[bytes, bytes]]]:
    """Yield process id, rank and environment of each process that is a rank."""
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            variables = dict(word.partition(b"=")[::2] for word in words)
            rank = next((variables[name] for name in RANK_VARIABLES if name in variables), None)
            if rank is not None and not is_guard(Path(f"/proc/{pid}/cmdline").read_bytes()):
                yield pid, rank, variables


LOCAL_SIZES = (b"OMPI_COMM_WORLD_LOCAL_SIZE", b"MPI_LOCALNRANKS")
SIZES = (b"OMPI_COMM_WORLD_SIZE", b"PMI_SIZE")


def missing_ranks(pids: Collection[int]) -> tuple[str, str]:
    """Describe missing ranks, for which others wait in ``MPI_Init`` or ``MPI_Finalize``.

    The function cannot see ranks on other hosts.

    Args:
        pids: descendants of mpirun.

    Returns:
        Two texts. The first names the ranks on this host that ended while others wait in
        ``MPI_Init``; it is empty if no rank ended. Such a rank has failed, because
        ``MPI_Finalize`` waits for all ranks. The second names the MPI call in which ranks wait,
        and the missing ranks; it is empty if no rank waits.
    """
    names = {each: name_of(each) for each in pids}
    call = next((name for name in IN_MPI if name in names.values()), "")
    living, waiting, num_here, size = set[int](), set[int](), 0, 0
    for each, rank, variables in _ranks(names if call else ()):
        living.add(int(rank))
        found = stat(each)
        if names[each] == call and found is not None and found.state not in STOPPED_STATES:
            waiting.add(int(rank))
        num_here, size = _number(variables, LOCAL_SIZES), _number(variables, SIZES)
    is_complete = 0 < num_here == size
    if late := ({*range(size)} if is_complete else living) - waiting:
        text = f"{call} for {format_ranks(late)}"
    else:
        text = f"{call}, which all ranks have begun" if is_complete else f"{call} for other hosts"
    # A process with an unreadable environment, as in a container, may be a rank that starts.
    is_sure = call == JOINING and all(os.access(f"/proc/{each}/environ", os.R_OK) for each in pids)
    if not (is_sure and 0 < len(living) < num_here):
        return "", text if call else ""
    gone = f"{num_here - len(living)} of {num_here} ranks on this host"
    return format_ranks({*range(size)} - living) if is_complete else gone, text


def _number(variables: Mapping[bytes, bytes], names: Sequence[bytes]) -> int:
    return int(next((variables[name] for name in names if name in variables), b"0"))


def below(pid: int) -> dict[int, int]:
    """Return the start times of the living descendants of a process, by process id.

    The function does not scan all processes of the host.
    """
    found: dict[int, int] = {}
    for child in _children(pid):
        if (status := stat(child)) and status.state not in {"Z", "X"}:
            found |= {child: status.birth, **below(child)}
    return found


def _children(pid: int) -> list[int]:
    """List the children of a process; empty if the process has ended, or without /proc."""
    children: list[str] = []
    with contextlib.suppress(OSError):
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children += listed.read_text().split()
    return [*map(int, children)]


def catches(pid: int) -> set[int]:
    """Return the numbers of the signals for which a process has a handler.

    Raises:
        OSError: the process does not exist, or there is no /proc.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return {number for number in range(1, mask.bit_length() + 1) if mask >> (number - 1) & 1}


def kill_orphans(born: Mapping[int, int]) -> None:
    """Kill the processes of ``born`` that still run after the death of their mpirun.

    Args:
        born: result of ``below`` from before the death.
    """
    left = [pid for pid, moment in born.items() if birth(pid) == moment]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        write_line(f"mpirun was killed, and left {len(left)} processes, which are killed")


def has_only_dead_children(pid: int) -> bool:
    """Return True if a process has children, and all of them have ended."""
    states = {found.state for child in _children(pid) if (found := stat(child))}
    return bool(states) and states <= {"Z", "X"}


def descendants(pid: int) -> list[int]:
    """List the living processes below ``pid``, deepest last; empty without /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if found := stat(int(folder.name)):
            children.setdefault(found.parent, []).append(int(folder.name))
    listed = list(children.get(pid, ()))
    for child in listed:
        listed += children.get(child, ())
    return listed
