"""The end of an attempt to train, agreed on by all ranks."""

import contextlib
import enum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hpctrain.comm.agreement import by_rank
from hpctrain.core.errors import MismatchError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

T = TypeVar("T")

MAX_STRAYS = 1000
"""Operations that other ranks may still have under way when one wants to agree."""


class End(enum.IntEnum):
    """How an attempt has ended, the gravest last."""

    DONE = 0
    UPDATED = 1
    """Hosts come or go."""
    MET_OTHERS = 2
    """An operation of this rank has met another one of a rank that had left the way."""
    FAILED = 3


class Ending(NamedTuple):
    """The end of an attempt on one rank, or on all together."""

    end: End
    error: Exception | None = None
    skip_sync: bool = False
    text: str = ""
    """What went wrong, by rank; of all ranks together."""


def agree(comm: "Communicator", mine: Ending) -> Ending:
    """Return how the attempt has ended on all ranks together: as on the rank it is worst on.

    Collective, the same result on every rank. A rank that comes here meets others that are still
    training in whatever they do next: both raise, the others come here as well, and this one
    tries again.
    """
    told = (mine.end, mine.skip_sync, None if mine.error is None else str(mine.error))
    endings = _gather(comm, told)
    worst = max(end for end, _, _ in endings)
    text = by_rank([message if end == worst else None for end, _, message in endings])
    skip_sync = all(end is End.UPDATED and skip for end, skip, _ in endings)
    return Ending(worst, mine.error, skip_sync, text)


def _gather(comm: "Communicator", told: T) -> list[T]:
    for _ in range(MAX_STRAYS):
        with contextlib.suppress(MismatchError):
            return comm.allgather_object(told)
    return comm.allgather_object(told)
