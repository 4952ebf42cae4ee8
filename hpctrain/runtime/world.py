"""The world of this process: the only module of hpctrain with state that changes."""

import atexit
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hpctrain import config, logs
from hpctrain.cluster.topology import Topology
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.factory import Connection, connect
from hpctrain.comm.joining import find_world
from hpctrain.comm.observed import observed
from hpctrain.comm.plan import Plan
from hpctrain.comm.statistics import Statistics, wanted_statistics
from hpctrain.comm.threaded import ThreadedCommunicator
from hpctrain.comm.trace import Trace
from hpctrain.config import Settings
from hpctrain.errors import ConfigError, NotInitializedError
from hpctrain.runtime.abort import FailureHooks, install
from hpctrain.runtime.exit import leave

if TYPE_CHECKING:
    from hpctrain.comm.presence import Presence


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What ``init`` found and made."""

    comm: Communicator
    topology: Topology
    plan: Plan
    plan_origin: str
    """What the plan was chosen by, for people."""
    settings: Settings
    presence: "Presence | None"
    """Who is still there; None in a world of one."""
    statistics: Statistics | None
    """What the collectives cost, where that is wanted."""
    hooks: FailureHooks | None
    """What ends all ranks when this one fails; None in a world of one."""


_world: World | None = None


def init(*, ranks_per_node: int | None = None) -> None:
    """Join the world of all ranks that were started together. Collective.

    A second call does nothing. Without a launcher this is a world of one, in which everything
    works and nothing is sent. At the end of the program the ranks take leave of each other by
    themselves.

    Args:
        ranks_per_node: declares nodes on one host, so that a laptop runs the two-level path;
            else what ``HPCTRAIN_RANKS_PER_NODE`` says.

    Raises:
        ConfigError: a setting is not valid.
        LaunchError: the launcher, the MPI library and the world do not fit together.
        NodeMemoryError: shared memory was forced and cannot be had.
    """
    if _world is not None:
        return
    settings = Settings.from_env()
    if ranks_per_node is not None:
        if ranks_per_node < 1:
            raise ConfigError(f"ranks_per_node must be at least 1, got {ranks_per_node}")
        settings = replace(settings, ranks_per_node=ranks_per_node)
    join(settings)


def join(settings: Settings) -> None:
    """Join the world as ``init`` does, with settings that are complete. Collective."""
    global _world  # noqa: PLW0603 - the one place
    if _world is not None:
        return
    ranks = find_world()
    hooks = install(ranks, settings.log_dir) if ranks else None  # from here on nobody fails alone
    threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else None
    found = connect(ranks, settings, threads)
    if ranks:
        torch.set_num_threads(found.plan.threads)
    trace = Trace() if settings.trace else None
    statistics = wanted_statistics(found.comm, found.plan.measured, here=settings.stats)
    _world = World(
        comm=_beside(found.plan, observed(found.comm, trace, statistics)),
        topology=found.topology,
        plan=found.plan,
        plan_origin=found.plan_origin,
        settings=settings,
        presence=found.presence,
        statistics=statistics,
        hooks=hooks,
    )
    logs.setup(found.topology.rank, found.topology.size, settings.log_dir)
    _report(found)
    if found.presence is not None or statistics is not None:
        atexit.register(shutdown)


def _beside(plan: Plan, comm: Communicator) -> Communicator:
    """Give the communicator the thread that the plan wants: one, for all optimizers."""
    return ThreadedCommunicator(comm) if plan.overlap == "thread" else comm


def _report(found: Connection) -> None:
    logs.logger.debug("plan by %s: %s", found.plan_origin, found.plan)
    notes = found.comm.gather_object([*config.unknown_variables(), *found.notes])
    if notes is not None:
        logs.warn_merged(notes)


def shutdown() -> None:
    """Take leave of the other ranks; nothing but ``init`` may be called afterwards.

    Collective in the end: it waits until every rank has called it or ended. Harmless before
    ``init`` and when called twice.
    """
    global _world
    if _world is None:
        return
    leaving, _world = _world, None
    atexit.unregister(shutdown)
    if isinstance(leaving.comm, ThreadedCommunicator):
        leaving.comm.drain()  # while lost ranks are still looked for
    if leaving.presence is not None and leaving.hooks is not None:
        leave(leaving.presence, leaving.hooks)
    if leaving.statistics is not None:
        leaving.statistics.report()  # nobody waits in vain: from `leave` all return, or none
    leaving.comm.close()
    if leaving.hooks is not None and sys.exc_info()[0] is None:
        leaving.hooks.uninstall()  # an error on its way out still needs them to end all ranks


def current() -> World:
    """Return the world.

    Raises:
        NotInitializedError: there is none yet.
    """
    if _world is None:
        raise NotInitializedError("this needs the world of all ranks; call hpctrain.init() first")
    return _world


def is_initialized() -> bool:
    """Say whether ``init`` was called and ``shutdown`` was not."""
    return _world is not None


def rank() -> int:
    """Return the number of this process, from 0."""
    return current().topology.rank


def size() -> int:
    """Return the number of ranks."""
    return current().topology.size


def local_rank() -> int:
    """Return the number of this rank on its node, from 0."""
    return current().topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return current().topology.local_size


def cross_rank() -> int:
    """Return the number of this node among those that have a rank of this ``local_rank``."""
    return current().topology.cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a rank of this ``local_rank``."""
    return current().topology.cross_size
