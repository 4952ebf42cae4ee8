"""Building the communicator: ranks that share memory, ranks that share a rail."""

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
"""An ordinary tensor's part on one node: a few of them stay in the last-level cache."""
LEVELS_SLOT_BYTES = 4 << 20
"""An ordinary tensor's part between nodes: large enough to hide the latency of a rail."""


def share_memory(
    world: MPI.Intracomm, topology: Topology, wanted: str, watch: Watch
) -> tuple[SharedMemory | None, str]:
    """Share memory on every node, or on none, in which case it says why. Collective.

    ``wanted`` is one of ``config.SHARED_MEMORY``; ``NodeMemoryError``, on every rank, where it was
    forced and cannot be had.
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
            f"node memory {wanted}, which HPCTRAIN_SHARED_MEMORY or the plan of HPCTRAIN_PLAN "
            f"wants, cannot be had: {reason}; leave that out"
        )
    return None, reason


def join(
    world: MPI.Intracomm,
    node: SharedMemory | None,
    topology: Topology,
    plan: Plan,
    watch: Watch,
    world_ranks: Sequence[int] = (),
) -> Communicator:
    """Make the communicator of all ranks, flat where ``node`` is None. Collective.

    It keeps ``world``; ``world_ranks`` are the world's numbers of its ranks, empty where they are
    the same.
    """
    world_ranks = world_ranks or range(world.size)
    group = partial(_group, topology=topology, watch=watch, world_ranks=world_ranks)
    if node is None:
        flat = partial(group, plan=plan)
        return MpiCommunicator(world, watch=watch, world_ranks=world_ranks, make_group=flat)
    made = HierarchicalCommunicator(
        world,
        node,
        _rail(world, topology, plan, watch, world_ranks) if plan.num_rails else None,
        plan=plan,
        watch=watch,
        world_ranks=world_ranks,
        make_group=lambda members, ranks, limit: group(members, ranks, limit, plan=made.plan),
    )
    return made


def _rail(
    world: MPI.Intracomm,
    topology: Topology,
    plan: Plan,
    watch: Watch,
    world_ranks: Sequence[int],
) -> Rail | None:
    number = topology.local_rank
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


def _group(  # noqa: PLR0913 - two of a group, and what all groups have in common
    members: MPI.Intracomm,
    ranks: Sequence[int],
    limit: Limit | None,
    *,
    topology: Topology,
    plan: Plan,
    watch: Watch,
    world_ranks: Sequence[int],
) -> Communicator:
    """Make a communicator of ``members``, which are these ``ranks`` of a larger one."""
    if len(ranks) == 1:
        requests.free(members)
        return SerialCommunicator()
    inside = topology.of_group(ranks)
    of_world = [world_ranks[rank] for rank in ranks]
    watch = watch.of_group(of_world, limit)
    way = "off" if plan.node_memory == "none" else plan.node_memory
    node, _ = share_memory(members, inside, way, watch)
    return join(members, node, inside, plan_for_group(plan, inside), watch, of_world)
