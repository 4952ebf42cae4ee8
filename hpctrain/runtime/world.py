"""The world of this process: the only module of hpctrain with state that changes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.core.errors import NotInitializedError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from hpctrain.cluster.topology import Topology
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.liveness import Liveness
    from hpctrain.comm.mpi_start import MpiComm
    from hpctrain.comm.plan.plan import Plan
    from hpctrain.core.config import Settings
    from hpctrain.negotiation.stall import LastCall
    from hpctrain.runtime.attachments import Attachments, Origin
    from hpctrain.runtime.last_check import OpenedSteps
    from hpctrain.runtime.process_set_table import ProcessSets
    from hpctrain.runtime.rebuild import Rebuild
    from hpctrain.runtime.stopping import CommonStop


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What ``init`` found and made."""

    comm: "Communicator"  # all ranks, for buckets; named operations have one of their own
    sets: "ProcessSets"  # what named operations go through
    topology: "Topology"
    plan: "Plan"
    plan_origin: str  # what the plan was chosen by, for people
    settings: "Settings"
    presence: "Liveness | None"  # who is still there; None in a world of one
    attachments: "Attachments"
    ranks: "MpiComm | None"  # the same ranks for MPI; None in a world of one
    origin: "Origin"
    rebuild: "Rebuild"  # who holds state about the ranks
    last_call: "LastCall"  # what this rank has communicated last
    stop: "CommonStop"  # whether the ranks of a loop of the user's own are to stop
    step_checks: "MutableMapping[Communicator, OpenedSteps]"
    """What opens the steps of distributed optimizers, by the ranks that take them."""

    @property
    def is_first(self) -> bool:
        """Whether no ranks were lost before this world."""
        return self.origin.is_first


_world: World | None = None


def replace_current(world: World | None) -> World | None:
    """Make ``world`` the current one; return the one before. Not collective."""
    global _world
    before, _world = _world, world
    return before


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


def is_homogeneous() -> bool:
    """Say whether every node has the same number of ranks."""
    return current().topology.is_homogeneous


def should_stop() -> bool:
    """Return whether all ranks should save their state and end with exit code ``STOPPED``, 85.

    Collective: call it between two steps of your own loop, on every rank. True on all ranks if one
    of them was asked: by SIGTERM, SIGUSR1 or Ctrl-C; by a file STOP in the run directory; or
    because ``HPCTRAIN_BUDGET`` or the job ends within a minute. The first call must be made in the
    main thread: from then on these signals only ask, before they end the process as usual.

        if hvd.should_stop():
            checkpoints.save(state, step=step, wait=True)
            sys.exit(hvd.STOPPED)

    Raises:
        CommError: the first call on some rank was made in another thread; on every rank.
    """
    return current().stop.is_asked()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002
    """Record what named operations do from now on, in a file that Perfetto and Chrome open.

    Not collective. A timeline that is being recorded in another file ends.

    Args:
        file_path: the file of rank 0, the only one that records; with ``{rank}`` in it, which
            becomes the number of each, every rank that calls this writes a file.
        mark_cycles: whether to mark where each round of the controller begins.

    Raises:
        NotInitializedError: ``init`` was not called; a ``ValueError``.
    """
    current().attachments.timelines.start(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """End the timeline: its file is complete. Not collective; harmless without one.

    Raises:
        NotInitializedError: ``init`` was not called; a ``ValueError``.
    """
    current().attachments.timelines.stop()
