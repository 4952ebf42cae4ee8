"""Creation of communicators, with the memory and the rails that their ranks share."""

from collections.abc import Sequence
from functools import partial

from hpctrain.cluster.topology import Topology
from hpctrain.comm import requests
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.hierarchical import HierarchicalCommunicator
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.mpi_start import MPI
from hpctrain.comm.node.shared_memory import SharedMemory
from hpctrain.comm.plan.choice import plan_for_group
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.rail.rail import Rail
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.comm.survivors import use
from hpctrain.comm.waiting import Limit, Watch
from hpctrain.comm.watched_calls import WatchedCalls
from hpctrain.core.errors import NodeMemoryError

SLOT_BYTES = 1 << 20
"""Bytes per slot of the staging buffers on one node; a few slots fit the last-level cache."""
LEVELS_SLOT_BYTES = 4 << 20
"""Bytes per slot of the staging buffers with several nodes, which hides network latency."""


def share_memory(
    world: MPI.Intracomm, topology: Topology, wanted: str, watch: Watch
) -> tuple[SharedMemory | None, str]:
    """Allocate shared memory on every node, or on none. Collective.

    Args:
        world: all ranks.
        topology: nodes of the ranks.
        wanted: a value of the setting ``shared_memory``.
        watch: performs all waits.

    Returns:
        The shared memory and an empty text, or None and the reason.

    Raises:
        NodeMemoryError: shared memory is required but not available; on every rank.
    """
    if wanted == "off":
        return None, "HPCTRAIN_SHARED_MEMORY=off"
    calls = WatchedCalls(world, watch)
    node = calls.split(topology.node, world.rank)
    assert node is not None, "each rank has a node"
    use(node)
    slot_bytes = SLOT_BYTES if topology.num_nodes == 1 else LEVELS_SLOT_BYTES
    made, refusal = None, None
    try:
        made = SharedMemory(
            node, spin=not topology.shared_cores, watch=watch, stage_bytes=2 * slot_bytes
        )
    except NodeMemoryError as error:
        refusal = str(error)
    reason = next((text for text in calls.allgather(refusal) if text), "")
    if not reason:
        return made, ""
    requests.free(node)
    if wanted != "auto":
        raise NodeMemoryError(
            f"node memory {wanted} must be available if HPCTRAIN_SHARED_MEMORY or the plan of "
            f"HPCTRAIN_PLAN selects it, but {reason}; unset these variables"
        )
    return None, reason


def join(
    world: MPI.Intracomm,
    node: SharedMemory | None,
    topology: Topology,
    plan: Plan,
    watch: Watch,
) -> Communicator:
    """Create the communicator of the ranks of ``world``. Collective.

    Args:
        world: MPI communicator, owned by the result.
        node: memory shared by the ranks of this node; None for flat MPI.
        topology: nodes of the ranks.
        plan: algorithms by size.
        watch: performs all waits.
    """
    group = partial(_group, topology=topology, watch=watch)
    if node is None:
        flat = partial(group, plan=plan)
        return MpiCommunicator(world, watch=watch, make_group=flat)
    made = HierarchicalCommunicator(
        world,
        node,
        _rail(world, topology, plan, watch) if plan.num_rails else None,
        plan=plan,
        watch=watch,
        make_group=lambda members, ranks, limit: group(members, ranks, limit, plan=made.plan),
    )
    return made


def _rail(world: MPI.Intracomm, topology: Topology, plan: Plan, watch: Watch) -> Rail | None:
    number, world_ranks = topology.local_rank, watch.ranks or range(world.size)
    color = number if number < plan.num_rails else MPI.UNDEFINED
    rail = WatchedCalls(world, watch).split(color, topology.node)
    if rail is None:
        return None
    use(rail)
    return Rail(
        rail,
        table=plan.rail,
        chunk_bytes=plan.chunk_bytes,
        watch=watch,
        world_ranks=[world_ranks[ranks[number]] for ranks in topology.nodes],
        name=f"rail {number}",
    )


def _group(
    members: MPI.Intracomm,
    ranks: Sequence[int],
    limit: Limit | None,
    *,
    topology: Topology,
    plan: Plan,
    watch: Watch,
) -> Communicator:
    """Create the communicator of a group of ``ranks``, which are ranks of the parent."""
    if len(ranks) == 1:
        requests.free(members)
        return SerialCommunicator()
    inside = topology.of_group(ranks)
    watch = watch.of_group(ranks, limit)
    method = "off" if plan.node_memory == "none" else plan.node_memory
    node, _ = share_memory(members, inside, method, watch)
    return join(members, node, inside, plan_for_group(plan, inside), watch)
