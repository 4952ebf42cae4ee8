"""Parts of ``World``: how this process joined, and the hooks that it installed."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.comm.observed import Statistics
from hpctrain.comm.owner import Owner
from hpctrain.comm.request_thread import RequestThread
from hpctrain.negotiation.timeline import Timelines
from hpctrain.runtime.abort import FailureHooks
from hpctrain.runtime.last_check import LastStates

if TYPE_CHECKING:
    from hpctrain.comm.mpi_library import BeforeFinalize
    from hpctrain.comm.mpi_start import MpiComm
    from hpctrain.comm.spares import Spares


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """How this process joined its world."""

    given: "MpiComm | None"  # communicator passed to ``init``
    is_first: bool = True  # False after ranks were lost
    spares: "Spares | None" = None  # ranks that wait to replace lost ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachments:
    """Hooks and records of a world in this process, removed with the world."""

    hooks: FailureHooks | None
    """End all ranks when this rank fails; None in a world of one rank."""
    before_finalize: "BeforeFinalize | None"
    """Leaves the world if the program calls ``MPI.Finalize``; None in a world of one rank."""
    statistics: Statistics | None  # bytes and times of collectives; None unless ``stats`` is set
    timelines: Timelines  # the timeline that this rank records, if any
    owner: Owner = field(default_factory=Owner)  # process that ends the world, not a forked child
    requests: RequestThread = field(default_factory=RequestThread)
    """Thread that answers requests of other ranks to parameter servers in this process."""
    last_states: LastStates = field(default_factory=LastStates)
    """States of sharded models after the last step, which ``shutdown`` compares."""
