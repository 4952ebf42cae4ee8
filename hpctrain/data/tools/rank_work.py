"""Work of a tool shared by ranks, which learn of each other's errors while they work."""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar, cast

from hpctrain.comm.agreement import agreed
from hpctrain.core.errors import DataError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

T = TypeVar("T")

Advance = Callable[[int], None]
"""Gets how much was done since its last call: samples, or bytes."""
Start = Callable[[int], Advance]  # gets how much this rank has to do

TURN_S = 2.0  # how long a rank works until it hears of the others


class _OneRank:
    """The communicator of a process alone, as far as tools need it; loads no torch."""

    rank, size = 0, 1

    def allgather_object(self, value: object) -> list[object]:
        return [value]

    def broadcast_object(self, value: object) -> object:
        return value

    def barrier(self) -> None:
        pass


def or_alone(comm: "Communicator | None") -> "Communicator":
    """Return the ranks that work, or a communicator of this process alone."""
    return comm or cast("Communicator", _OneRank())


def followed(start: Start | None, total: int) -> Advance:
    """Return the function that gets the progress, of ``total``; without ``start`` a no-op."""
    return start(total) if start else lambda _: None


def in_turns(comm: "Communicator", pieces: Iterable[T], work: Callable[[T], object]) -> None:
    """Do the work of this rank piece by piece, until all ranks are done or one fails.

    Collective. The ranks synchronize often, so that none waits longer than a message may take.
    Raises ``DataError``: the work of a rank raised one; on every rank.
    """
    left = iter(pieces)
    is_done = False
    while True:
        with agreed(comm, DataError):
            end = time.monotonic() + TURN_S
            for piece in () if is_done else left:
                work(piece)
                if time.monotonic() >= end:
                    break
            else:
                is_done = True
        if all(comm.allgather_object(is_done)):
            return
