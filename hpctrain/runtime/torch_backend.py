"""The backend ``hpctrain`` of torch.distributed: its groups are ranks of the world.

Imported with torch, by the entry point ``torch.backends``: all it needs is imported when a group
is made.
"""

import math
import weakref
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.core.logs import logger

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.process_group.group import HpctrainGroup
    from hpctrain.comm.waiting import Limit
    from hpctrain.core.torch_compat import Store


def register() -> None:
    """Register the backend ``hpctrain`` of torch.distributed. A second call has no effect.

    ``import torch`` calls this function in every program, so a torch without the names that the
    backend needs gives a warning instead of an error.
    """
    try:
        from hpctrain.comm.process_group import rendezvous  # noqa: PLC0415
    except (ImportError, AttributeError) as error:
        logger.warning(f"torch {torch.__version__} has no backend hpctrain: {error}")
    else:
        rendezvous.register(_create, _find_ranks)


def _find_ranks(timeout: timedelta) -> "tuple[Store, int, int]":
    """Join the world of all ranks, and make a store for them. Collective.

    ``RankLostError`` if a rank does not come within ``timeout``.
    """
    from hpctrain.comm.mpi_world import await_world  # noqa: PLC0415
    from hpctrain.comm.process_group import rendezvous  # noqa: PLC0415
    from hpctrain.core.config import Settings  # noqa: PLC0415
    from hpctrain.runtime import initialization, world  # noqa: PLC0415
    from hpctrain.runtime.abort import start_guard  # noqa: PLC0415

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


def _limit_of(timeout: timedelta) -> "Limit":
    """Return the limit of waits of a group; that of the world holds for torch's default, too."""
    from hpctrain.comm.waiting import Limit  # noqa: PLC0415
    from hpctrain.core.config import Settings  # noqa: PLC0415
    from hpctrain.runtime import world  # noqa: PLC0415

    if timeout != dist.default_pg_timeout:
        return Limit(timeout.total_seconds(), "timeout")
    settings = world.current().settings if world.is_initialized() else Settings.from_env()
    return Limit(min(timeout.total_seconds(), settings.timeout or math.inf))


def _create(options: Any, _: object = None) -> "HpctrainGroup":
    """Make a group of the ranks that torch names, all of the world for none. Collective."""
    from hpctrain.comm.mpi_library import calls_from_threads  # noqa: PLC0415
    from hpctrain.comm.process_group import torch_functions  # noqa: PLC0415
    from hpctrain.comm.process_group.group import HpctrainGroup  # noqa: PLC0415
    from hpctrain.core.errors import LaunchError  # noqa: PLC0415
    from hpctrain.runtime import initialization, world  # noqa: PLC0415
    from hpctrain.runtime.rebuild import RebuildStage  # noqa: PLC0415

    initialization.init()
    here = world.current()
    topology, ranks = here.topology, list(options.global_ranks_in_group)
    purpose = "a group" if ranks else "the world"
    if not ranks:
        ranks = list(range(topology.size))
        told, found = (options.group_rank, options.group_size), (topology.rank, topology.size)
        if told != found:
            raise LaunchError(
                f"torch.distributed says that this is rank {told[0]} of {told[1]}, MPI that it is "
                f"rank {found[0]} of {found[1]}; start the ranks with mpirun, srun or hpctrain "
                f"launch, and leave out RANK, WORLD_SIZE and what init_process_group is told"
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


def _shut_down(kept: "weakref.ref[HpctrainGroup]") -> None:
    group = kept()
    if group is not None:
        group.shutdown()


def _communicator(comm: Any, ranks: list[int], limit: "Limit", purpose: str) -> "Communicator":
    from hpctrain.comm.process_group.ordered import GroupRankLostError  # noqa: PLC0415
    from hpctrain.comm.serial import SerialCommunicator  # noqa: PLC0415
    from hpctrain.core.errors import RankLostError  # noqa: PLC0415

    if len(ranks) == 1:
        return SerialCommunicator()
    # The purpose is not the name, which ranks count by the groups that each of them is in.
    try:
        made: Communicator = comm.group_by_members(ranks, purpose=purpose, limit=limit)
    except RankLostError as error:
        text = f"a group of ranks {ranks} was not made on rank {comm.rank}: {error}"
        raise GroupRankLostError(text) from error
    return made
