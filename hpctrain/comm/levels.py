"""Which ranks share memory, which share a rail, and the communicator that follows."""

from typing import cast

from mpi4py import MPI

from hpctrain.cluster.topology import Topology
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.hierarchical import HierarchicalCommunicator
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.node_memory import Memfd, NodeMemory, Window
from hpctrain.comm.plan import Plan
from hpctrain.comm.rail import Rail
from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.comm.work import Check
from hpctrain.errors import NodeMemoryError


def share_memory(
    world: MPI.Intracomm, topology: Topology, wanted: str, check: Check
) -> tuple[SharedMemory | None, str]:
    """Try the ways to share memory until one works on every node. Collective.

    Args:
        world: all ranks.
        topology: says which of them are on my node.
        wanted: one of ``config.SHARED_MEMORY``.
        check: looks for lost ranks.

    Returns:
        The node level and an empty string, or None and the reason.

    Raises:
        NodeMemoryError: a way was forced and does not work; on every rank.
    """
    if wanted == "off":
        return None, "HPCTRAIN_SHARED_MEMORY=off"
    ways: dict[str, NodeMemory] = {"memfd": Memfd(), "window": Window()}
    node = cast("MPI.Intracomm", world.Split(topology.node, world.rank))
    reason = ""
    for memory in ways.values() if wanted == "auto" else [ways[wanted]]:
        made, refusal = None, None
        try:
            made = SharedMemory(node, memory, spin=not topology.shared_cores, check=check)
        except NodeMemoryError as error:
            refusal = str(error)
        refusals = [text for text in world.allgather(refusal) if text]
        if not refusals:
            return made, ""
        reason = refusals[0]
    node.Free()
    if wanted != "auto":
        raise NodeMemoryError(f"HPCTRAIN_SHARED_MEMORY={wanted} cannot be had: {reason}")
    return None, reason


def join(
    world: MPI.Intracomm, node: SharedMemory | None, topology: Topology, plan: Plan, check: Check
) -> Communicator:
    """Make the communicator of all ranks, flat where ``node`` is None. Collective."""
    if node is None:
        return MpiCommunicator(world, check=check)
    rail = None
    if plan.num_rails:
        color = topology.local_rank if topology.local_rank < plan.num_rails else MPI.UNDEFINED
        if split := cast("MPI.Intracomm", world.Split(color, topology.node)):
            rail = Rail(split, ring_bytes=plan.ring_bytes, check=check)
    return HierarchicalCommunicator(
        world,
        node,
        rail,
        num_rails=plan.num_rails,
        staged_bytes=plan.staged_bytes,
        check=check,
    )
