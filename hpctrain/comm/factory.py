"""From a process to a communicator: what is here, who shares memory, which plan follows."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from hpctrain.cluster import env, preflight, process
from hpctrain.cluster.cores import affinity, quota
from hpctrain.cluster.nics import num_cards
from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan import planning
from hpctrain.comm.plan.choice import choose_plan
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.plan.plan_file import StoredPlan
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.comm.waiting import Watch
from hpctrain.core.config import Settings
from hpctrain.core.libc import sharpen_sleep

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.liveness import Liveness


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """What ``connect`` found and made."""

    comm: Communicator
    topology: Topology
    plan: Plan
    plan_origin: str
    """What the plan was chosen by, for people."""
    presence: "Liveness | None"
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
        LaunchError: Horovod is wanted and some rank has none that works; on every rank.
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


def _visible(processes: Sequence[process.ProcessIdentity], rank: int) -> dict[int, int]:
    """Return the pid of every rank whose process this one can see."""
    return {
        other: found.pid
        for other, found in enumerate(processes)
        if found.namespace == processes[rank].namespace
    }


def _watch(presence: "Liveness", topology: Topology, settings: Settings) -> Watch:
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
    from hpctrain.comm.liveness import Liveness  # noqa: PLC0415 - a world of one needs no MPI

    sharpen_sleep()
    presence = Liveness(world.Dup(), _visible(world.allgather(process.identity()), world.rank))
    watch = _watch(presence, topology, settings)
    ranks = _Ranks(world, topology, settings, num_threads, watch)
    joined = _by_horovod(ranks) if settings.engine == "horovod" else _by_levels(ranks)
    comm, decision, note = joined
    notes = [preflight.core_warning(topology), note]
    return Connection(
        comm=comm,
        topology=topology,
        plan=decision.plan,
        plan_origin=decision.origin,
        presence=presence,
        notes=tuple(note for note in notes if note),
        settings=settings,
    )


class _Ranks(NamedTuple):
    """Ranks that are to be joined."""

    world: "MPI.Intracomm"
    topology: Topology
    settings: Settings
    num_threads: int
    watch: Watch

    def decide(self, stored: StoredPlan | None, node_memory: str) -> planning.PlanDecision:
        """Choose the plan; the same on every rank. Collective."""
        world, topology = self.world, self.topology
        mine = (self.num_threads, planning.machine(len(topology.cores)))
        threads, machines = zip(*world.allgather(mine), strict=True)
        rule = world.bcast(
            choose_plan(topology, self.settings, node_memory=node_memory, threads=threads)
        )
        return planning.decide(world, topology, self.settings, stored, rule, machines)


_Joined: TypeAlias = tuple[Communicator, planning.PlanDecision, str]
"""All ranks, by which plan, and a warning."""


def _by_levels(ranks: _Ranks) -> _Joined:
    from hpctrain.comm import build  # noqa: PLC0415 - a world of one needs no MPI

    world, topology, settings, _, watch = ranks
    stored = planning.pinned(world, settings)
    node, refusal = planning.share_memory(world, topology, settings, stored, watch)
    way = node.memory_name if node else "none"
    decision = ranks.decide(stored, way)
    comm = build.join(world, node, topology, decision.plan, watch)
    decision = planning.measured(decision, comm, world, topology, watch)
    path = f"gradients go through an MPI {way}" if node else "gradients go flat over MPI"
    return comm, decision, refusal and f"{path}: {refusal}"


def _by_horovod(ranks: _Ranks) -> _Joined:

    world, topology, settings, _, watch = ranks
    decision = ranks.decide(planning.pinned(world, settings), "none")
    from hpctrain.comm.engines import horovod  # noqa: PLC0415 - only where it is wanted

    comm = horovod.join(
        world, topology, decision.plan, settings, watch, measures=bool(decision.key)
    )
    decision = planning.measured(decision, comm, world, topology, watch)
    comm.settle()
    return comm, decision, horovod.unmet_wish(topology, settings)
