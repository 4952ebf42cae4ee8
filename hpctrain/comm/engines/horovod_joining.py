"""The communicator of all ranks whose operations are Horovod's."""

from mpi4py import MPI

from hpctrain.cluster.topology import Topology
from hpctrain.comm.engines import horovod_session
from hpctrain.comm.engines.horovod import HorovodCommunicator, by_two_levels
from hpctrain.comm.engines.horovod_levels import Levels
from hpctrain.comm.engines.horovod_place import WORLD, HorovodPlace
from hpctrain.comm.plan.plan import Plan, has_equal_nodes
from hpctrain.comm.watch import Watch
from hpctrain.core.config import Settings


def join(
    world: MPI.Intracomm,
    topology: Topology,
    plan: Plan,
    settings: Settings,
    watch: Watch,
    *,
    measures: bool,
) -> HorovodCommunicator:
    """Start Horovod and make the communicator of all ranks. Collective.

    Args:
        world: all ranks; the communicator keeps it.
        topology: of these ranks.
        plan: how reductions travel.
        settings: of rank 0.
        watch: looks at the others during waits.
        measures: whether both ways must be there, to be measured.

    Raises:
        LaunchError: some rank has no Horovod that works; on every rank.
    """
    session = horovod_session.begin(world, settings)
    levels = None
    if has_equal_nodes(topology) and (measures or by_two_levels(plan)):
        levels = Levels(session, topology.nodes)
    place = HorovodPlace(
        session, session.torch.global_process_set, tuple(range(world.size)), levels, WORLD
    )
    return HorovodCommunicator(world, place, plan=plan, watch=watch)


def unmet_wish(topology: Topology, settings: Settings) -> str:
    """Return what to tell where two levels are wanted and cannot be; empty else."""
    if settings.horovod_way != "two-level" or has_equal_nodes(topology):
        return ""
    sizes = [len(ranks) for ranks in topology.nodes]
    return (
        f"two levels of Horovod need several nodes with several ranks each, as many on every one, "
        f"got {sizes}: sums go flat; set HPCTRAIN_HOROVOD_WAY=flat"
    )
