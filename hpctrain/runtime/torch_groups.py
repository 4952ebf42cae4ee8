"""Process groups of torch.distributed over the ranks of the world."""

import math
import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.comm.mpi_world import await_world
from hpctrain.comm.process_group import rendezvous, torch_functions
from hpctrain.comm.process_group.group import HpctrainGroup
from hpctrain.comm.process_group.ordered import GroupRankLostError
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.comm.waiting import Limit
from hpctrain.core.config import Settings
from hpctrain.core.errors import LaunchError, RankLostError
from hpctrain.core.torch_compat import Store
from hpctrain.core.units import format_ranks
from hpctrain.runtime import initialization, world
from hpctrain.runtime.abort import start_guard
from hpctrain.runtime.rebuild import RebuildStage


def find_ranks(timeout: timedelta) -> tuple[Store, int, int]:
    """Join the world of all ranks, and create a store for them. Collective.

    Raises:
        RankLostError: a rank does not arrive within ``timeout``.
    """
    if not world.is_initialized():
        with start_guard(Settings.from_env()):
            await_world(_limit_of(timeout).timeout_s)
        initialization.init()
    here = world.current()
    ranks = list(range(here.topology.size))
    comm = _communicator(here.comm, ranks, _limit_of(timeout), "a store")
    store = rendezvous.store_of(comm, timeout)
    comm.close()
    return store, here.topology.rank, here.topology.size


def _limit_of(timeout: timedelta) -> Limit:
    """Return a group's limit for waits; with torch's default, at most ``HPCTRAIN_TIMEOUT``."""
    if timeout != dist.default_pg_timeout:
        return Limit(timeout.total_seconds(), "timeout")
    settings = world.current().settings if world.is_initialized() else Settings.from_env()
    return Limit(min(timeout.total_seconds(), settings.timeout or math.inf))


def create(options: Any) -> HpctrainGroup:
    """Create a group of the ranks that torch passes, or of all ranks if torch passes none.

    Collective over these ranks.
    """
    initialization.init()
    here = world.current()
    topology, ranks = here.topology, list(options.global_ranks_in_group)
    purpose = "a group" if ranks else "the world"
    if not ranks:
        ranks = list(range(topology.size))
        given, found = (options.group_rank, options.group_size), (topology.rank, topology.size)
        if given != found:
            raise LaunchError(
                f"torch.distributed and MPI must have the same ranks, but this is rank {given[0]} "
                f"of {given[1]} in torch.distributed and rank {found[0]} of {found[1]} in MPI; "
                f"start the ranks with mpirun, srun or hpctrain launch, and leave out RANK, "
                f"WORLD_SIZE and the arguments rank and world_size of init_process_group"
            )
    limit = _limit_of(options.timeout)
    group = HpctrainGroup(
        _communicator(here.comm, ranks, limit, purpose),
        name=options.group_id,
        ranks=ranks,
        limit=limit,
        store=options.store,
        has_thread=calls_from_threads(),
    )
    torch_functions.adapt()
    here.rebuild.register(RebuildStage.HOLDERS, close=partial(_shut_down, weakref.ref(group)))
    return group


def _shut_down(kept: weakref.ref[HpctrainGroup]) -> None:
    group = kept()
    if group is not None:
        group.shutdown()


def _communicator(comm: Any, ranks: list[int], limit: Limit, purpose: str) -> Communicator:

    if len(ranks) == 1:
        return SerialCommunicator()
    # The name of a group depends on the groups that a rank has created before. The name may differ
    # between ranks, so it cannot serve as the purpose.
    try:
        made: Communicator = comm.group_by_members(ranks, purpose=purpose, limit=limit)
    except RankLostError as error:
        text = f"a group of {format_ranks(ranks)} was not created on rank {comm.rank}: {error}"
        raise GroupRankLostError(text) from error
    return made
