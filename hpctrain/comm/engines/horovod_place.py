"""Horovod's name of a group of ranks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.comm.engines.horovod_levels import Levels
    from hpctrain.comm.engines.horovod_session import Session

WORLD = "hpctrain"
"""Name of the communicator of all ranks."""


@dataclass(frozen=True, slots=True)
class HorovodPlace:
    """Some ranks of a world that Horovod serves."""

    session: "Session"
    process_set: Any
    """Horovod's object for these ranks."""
    ranks: tuple[int, ...]
    """Of the world, in the order of the communicator; Horovod has them sorted."""
    levels: "Levels | None"
    """The same ranks in two levels, where there are any."""
    name: str
    """What all names of operations begin with; no other communicator of the world has it."""
