"""Create the communicator of a world: discover the topology, share memory, choose a plan."""

import socket
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from hpctrain.cluster import env, preflight
from hpctrain.cluster.binding import bind, bound, share_of
from hpctrain.cluster.resources import affinity, num_cards, quota
from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.flight_recorder import FlightRecorder
from hpctrain.comm.node_processes import NodeProcesses
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.plan.planning import decide, measured, memory_wanted, pinned
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.comm.waiting import Watch
from hpctrain.core.config import Settings
from hpctrain.core.libc import sharpen_sleep

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.liveness import Liveness


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """A communicator, with the topology, the plan and the settings of its creation."""

    comm: Communicator
    topology: Topology
    plan: Plan
    plan_origin: str  # source of the plan, human-readable
    settings: Settings  # settings of rank 0, used on all ranks
    presence: "Liveness | None" = None  # detects lost ranks; None in a world of one rank
    notes: tuple[str, ...] = ()  # warnings of this rank, for the user
    recorder: FlightRecorder = field(default_factory=FlightRecorder)


def connect(
    world: "MPI.Intracomm | None", settings: Settings, threads_wanted: int | None = None
) -> Connection:
    """Create a communicator of the ranks of ``world``. Collective.

    Args:
        world: MPI communicator from ``find_world``, owned by the result; None for one rank.
        settings: settings of this rank; all ranks use the settings of rank 0.
        threads_wanted: number of torch threads that the user chose; None to choose the number
            here.

    Raises:
        ConfigError: the plan of ``settings.plan`` cannot be read or used; on every rank.
        NodeMemoryError: shared memory is required but does not work; on every rank.
        LaunchError: Horovod is required but does not work on a rank; on every rank.
    """
    if world is None:
        return _alone(settings)
    from hpctrain.comm.watched_calls import WatchedCalls  # noqa: PLC0415 - a world of one needs no MPI

    calls = WatchedCalls(world, Watch(rank=world.rank, timeout_s=settings.timeout))
    settings = calls.bcast(settings)
    facts = bound(calls.allgather(_facts(settings)))
    if facts[world.rank].cores != affinity():
        bind(facts[world.rank].cores)
    topology = Topology.from_facts(facts, world.rank, settings.ranks_per_node)
    num_cores, num_peers = len(topology.cores), len(topology.core_peers)
    threads = threads_wanted or preflight.threads_for(num_cores, num_peers, quota())
    about_devices = preflight.accelerator_warning(facts, world.rank)
    return _together(world, topology, settings, threads, about_devices)


def _facts(settings: Settings) -> RankFacts:
    launched, cores = env.launched(), affinity()
    return RankFacts(
        host=socket.gethostname(),
        cores=cores,
        share=share_of(launched, cores) if settings.binding == "auto" else (),
        cards=num_cards(),
        devices=torch.accelerator.device_count(),
        visible=env.visible_devices(),
        launcher=launched.name if launched else "alone",
        scheduler=env.scheduler(),
    )


def _alone(settings: Settings) -> Connection:
    topology, comm = Topology.from_facts([_facts(settings)], 0), SerialCommunicator()
    decision = decide(
        comm,
        topology,
        settings,
        pinned(comm, settings),
        node_memory="alone",
        num_threads=torch.get_num_threads(),  # keeps results identical to a run without hpctrain
    )
    return Connection(
        comm=comm,
        topology=topology,
        plan=decision.plan,
        plan_origin=decision.origin,
        settings=settings,
    )


def _together(
    world: "MPI.Intracomm",
    topology: Topology,
    settings: Settings,
    num_threads: int,
    about_devices: str | None,
) -> Connection:
    from hpctrain.comm import build  # noqa: PLC0415 - a world of one needs no MPI
    from hpctrain.comm.liveness import Liveness  # noqa: PLC0415
    from hpctrain.comm.mpi import MpiCommunicator  # noqa: PLC0415
    from hpctrain.comm.watched_calls import WatchedCalls  # noqa: PLC0415

    sharpen_sleep()
    calls = WatchedCalls(world, Watch(rank=world.rank, timeout_s=settings.timeout))
    processes, rank = NodeProcesses.of(calls), topology.rank
    presence = Liveness(calls.duplicate(), processes, settings.timeout)
    on_hosts = zip(topology.nodes, topology.hosts, strict=True)
    hosts = {rank: host for ranks, host in on_hosts for rank in ranks}
    watch = Watch(
        presence.check, hosts=hosts, rank=rank, timeout_s=settings.timeout, notices=presence
    )
    flat = MpiCommunicator(world, watch=watch)
    stored = pinned(flat, settings)
    choose = partial(decide, flat, topology, settings, stored, num_threads=num_threads)
    notes = [preflight.core_warning(topology), about_devices]
    comm: Communicator
    if settings.engine == "horovod":
        decision = choose(node_memory="none")
        engine = import_module("hpctrain.comm.horovod_engine")  # imports Horovod
        comm = engine.join(world, topology, decision.plan, settings, watch)
    else:
        method = memory_wanted(settings, stored)
        node, refusal = build.share_memory(world, topology, method, watch)
        decision = choose(node_memory="memfd" if node else "none")
        comm = build.join(world, node, topology, decision.plan, watch)
        notes.append(refusal and f"gradients are sent by flat MPI, without node memory: {refusal}")
    decision = measured(decision, comm, world, topology, watch)
    return Connection(
        comm=comm,
        topology=topology,
        plan=decision.plan,
        plan_origin=decision.origin,
        presence=presence,
        notes=tuple(note for note in notes if note),
        settings=settings,
        recorder=watch.recorder,
    )
