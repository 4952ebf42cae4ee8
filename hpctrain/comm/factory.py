"""From a process to a communicator: what is here, who shares memory, which plan follows."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hpctrain.cluster import env, preflight, process
from hpctrain.cluster.cards import num_cards
from hpctrain.cluster.cores import affinity, quota
from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.comm import planning
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan import Plan, choose_plan
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.comm.watch import Watch
from hpctrain.config import Settings

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.presence import Presence


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """What ``connect`` found and made."""

    comm: Communicator
    topology: Topology
    plan: Plan
    plan_origin: str
    """What the plan was chosen by, for people."""
    presence: "Presence | None"
    """Who is still there; None in a world of one."""
    notes: tuple[str, ...]
    """Warnings of this rank, for the user."""
    settings: Settings
    """By which all ranks decide: those of rank 0."""


def connect(
    world: "MPI.Intracomm | None", settings: Settings, threads_wanted: int | None = None
) -> Connection:
    """Make a communicator of the ranks of ``world``. Collective.

    Args:
        world: from ``find_world``; the communicator keeps it.
        settings: of this process; those of rank 0 decide where ranks must not differ.
        threads_wanted: torch's threads, where the user chose them; None for the cores at hand.

    Raises:
        ConfigError: the plan of ``settings.plan`` cannot be read or used; on every rank.
        NodeMemoryError: a way to share memory was forced and does not work; on every rank.
    """
    if world is None:
        return _alone(settings)
    settings = world.bcast(settings)
    topology = Topology.from_facts(world.allgather(_facts()), world.rank, settings.ranks_per_node)
    return _together(world, topology, settings, threads_wanted or _threads(topology))


def _facts() -> RankFacts:
    launched = env.launched()
    return RankFacts(
        host=socket.gethostname(),
        cores=affinity(),
        cards=num_cards(),
        launcher=launched.name if launched else "alone",
        scheduler=env.scheduler(),
    )


def _threads(topology: Topology) -> int:
    return preflight.threads_for(len(topology.cores), len(topology.core_peers), quota())


def _visible(processes: Sequence[process.Identity], rank: int) -> dict[int, int]:
    """Return the pid of every rank whose process this one can see."""
    return {
        other: found.pid
        for other, found in enumerate(processes)
        if found.namespace == processes[rank].namespace
    }


def _watch(presence: "Presence", topology: Topology, settings: Settings) -> Watch:
    return Watch(
        presence.check,
        hosts={
            rank: host
            for ranks, host in zip(topology.nodes, topology.hosts, strict=True)
            for rank in ranks
        },
        rank=topology.rank,
        timeout_s=settings.timeout,
    )


def _alone(settings: Settings) -> Connection:
    topology = Topology.from_facts([_facts()], 0)
    threads = [torch.get_num_threads()]  # torch's own: one rank is the plain loop, bit for bit
    rule = choose_plan(topology, settings, node_memory="alone", threads=threads)
    stored = planning.pinned(None, settings)
    decision = planning.decide(None, topology, settings, stored, rule)
    return Connection(
        comm=SerialCommunicator(),
        topology=topology,
        plan=decision.plan,
        plan_origin=decision.origin,
        presence=None,
        notes=(),
        settings=settings,
    )


def _together(
    world: "MPI.Intracomm", topology: Topology, settings: Settings, num_threads: int
) -> Connection:
    from hpctrain.comm import levels  # noqa: PLC0415 - a world of one needs no MPI
    from hpctrain.comm.presence import Presence  # noqa: PLC0415

    process.sharpen_sleep()
    presence = Presence(world.Dup(), _visible(world.allgather(process.identity()), world.rank))
    watch = _watch(presence, topology, settings)
    stored = planning.pinned(world, settings)
    node, refusal = planning.share_memory(world, topology, settings, stored, watch)
    mine = (num_threads, planning.machine(len(topology.cores)))
    threads, machines = zip(*world.allgather(mine), strict=True)
    way = node.memory_name if node else "none"
    rule = world.bcast(choose_plan(topology, settings, node_memory=way, threads=threads))
    decision = planning.decide(world, topology, settings, stored, rule, machines)
    comm = levels.join(world, node, topology, decision.plan, watch)
    decision = planning.measured(decision, comm, world, topology, watch)
    path = f"gradients go through an MPI {way}" if node else "gradients go flat over MPI"
    notes = [preflight.core_warning(topology), refusal and f"{path}: {refusal}"]
    return Connection(
        comm=comm,
        topology=topology,
        plan=decision.plan,
        plan_origin=decision.origin,
        presence=presence,
        notes=tuple(note for note in notes if note),
        settings=settings,
    )
