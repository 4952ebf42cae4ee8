"""Parts of the record of a world: how this process came to it, and what it changed here."""

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
    """How this process came to its world."""

    given: "MpiComm | None"  # the communicator that ``init`` was given
    is_first: bool = True  # whether no ranks were lost before
    spares: "Spares | None" = None  # ranks that wait to replace lost ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachments:
    """Hooks and records of a world in this process; they end with it."""

    hooks: FailureHooks | None  # end all ranks when this one fails; None in a world of one
    before_finalize: "BeforeFinalize | None"
    """Takes leave where the program ends MPI itself; None in a world of one."""
    statistics: Statistics | None  # costs of the collectives, if the settings ask for them
    timelines: Timelines  # the timeline that this rank records, if any
    owner: Owner = field(default_factory=Owner)  # a forked child does not end the world
    requests: RequestThread = field(default_factory=RequestThread)
    """Serves the requests to parameter servers of this process."""
    last_states: LastStates = field(default_factory=LastStates)
    """States of divided models after their last step, for the comparison at the end."""
