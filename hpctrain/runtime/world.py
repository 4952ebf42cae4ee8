"""The world, that is, all ranks that have called ``init``, and its state in this process."""

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
    """State of the world, created by ``init``."""

    comm: "Communicator"  # of all ranks, for buckets; named operations use another communicator
    sets: "ProcessSets"  # process sets, with the controllers of named operations
    topology: "Topology"
    plan: "Plan"
    plan_origin: str  # human-readable origin of the plan
    settings: "Settings"
    presence: "Liveness | None"  # detects lost ranks; None in a world of one rank
    attachments: "Attachments"
    ranks: "MpiComm | None"  # MPI communicator of all ranks; None in a world of one rank
    origin: "Origin"
    rebuild: "Rebuild"  # objects that depend on the ranks
    last_call: "LastCall"  # last collective of this rank
    stop: "CommonStop"  # stop requests, for training loops of the user
    step_checks: "MutableMapping[Communicator, OpenedSteps]"
    """Step protocols of distributed optimizers, by communicator."""

    @property
    def is_first(self) -> bool:
        """True if this world was not created after a loss of ranks."""
        return self.origin.is_first


_world: World | None = None


def replace_current(world: World | None) -> World | None:
    """Make ``world`` the current world; return the previous one. Not collective."""
    global _world
    before, _world = _world, world
    return before


def current() -> World:
    """Return the current world.

    Raises:
        NotInitializedError: ``init`` was not called.
    """
    if _world is None:
        raise NotInitializedError(
            "hpctrain must be initialized before this call, but is not; call hpctrain.init() first"
        )
    return _world


def is_initialized() -> bool:
    """Return True if ``init`` was called and ``shutdown`` was not."""
    return _world is not None


def rank() -> int:
    """Return the rank of this process, from 0."""
    return current().topology.rank


def size() -> int:
    """Return the number of ranks."""
    return current().topology.size


def local_rank() -> int:
    """Return the index of this rank among the ranks of its node, from 0."""
    return current().topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return current().topology.local_size


def cross_rank() -> int:
    """Return the index of this node, from 0, among the nodes that ``cross_size`` counts."""
    return current().topology.cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a rank with the ``local_rank`` of this process."""
    return current().topology.cross_size


def is_homogeneous() -> bool:
    """Return True if every node has the same number of ranks."""
    return current().topology.is_homogeneous


def should_stop() -> bool:
    """Return whether all ranks should save their state and end with exit code ``STOPPED``, 85.

    Collective: call this function between two steps of a training loop, on every rank. Returns
    True on all ranks if any rank has a request to stop: SIGTERM, SIGUSR1, SIGHUP or Ctrl-C; a file
    STOP in the run directory; the end of ``HPCTRAIN_BUDGET``; or the end of the job within a
    minute. The first call must be made in the main thread. After the first call, the first of
    these signals only requests a stop, and a second signal ends the process.

        if hvd.should_stop():
            checkpoints.save(state, step=step, wait=True)
            sys.exit(hvd.STOPPED)

    Raises:
        CommError: on some rank, the first call was not made in the main thread; raised on every
            rank.
    """
    return current().stop.is_asked()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002
    """Start a trace of named operations, in a file that Perfetto and Chrome open.

    Not collective. Ends a timeline that is recorded in another file.

    Args:
        file_path: file of rank 0, the only rank that records. If the path contains ``{rank}``,
            each calling rank writes a file, with its rank in the name.
        mark_cycles: whether to mark the start of each cycle of the controller.

    Raises:
        NotInitializedError: ``init`` was not called; the error is also a ``ValueError``.
    """
    current().attachments.timelines.start(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """End the timeline and complete its file. Not collective; a no-op without a timeline.

    Raises:
        NotInitializedError: ``init`` was not called; the error is also a ``ValueError``.
    """
    current().attachments.timelines.stop()
