"""Work of a tool shared by ranks, which hear of each other's errors while they work."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

from hpctrain.comm.agreement import agreed
from hpctrain.core.errors import DataError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

Advance = Callable[[int], None]
"""Is told how much was done since it was last told: samples, or bytes."""
Start = Callable[[int], Advance]  # is told how much this rank has to do

TURN_S = 2.0  # how long a rank works until it hears of the others


class _Alone:
    """The communicator of a process alone, as far as tools need it; loads no torch."""

    rank, size = 0, 1

    def allgather_object(self, value: object) -> list[object]:
        return [value]

    def broadcast_object(self, value: object) -> object:
        return value

    def barrier(self) -> None:
        pass


def or_alone(comm: "Communicator | None") -> "Communicator":
    """Return the ranks that work, or what stands for one that works alone."""
    return comm or cast("Communicator", _Alone())


def followed(start: Start | None, total: int) -> Advance:
    """Return what is told of progress, of ``total``; of nobody who wants to know, nothing."""
    return start(total) if start else lambda _: None


def in_turns(comm: "Communicator", work: Iterator[None]) -> None:
    """Do the work of this rank step by step, until all ranks are done or one fails.

    Collective. Ranks hear of each other often: no one waits longer than a message may take. Raises
    ``DataError``: the work of a rank raised one; on every rank.
    """
    is_done = False
    while True:
        with agreed(comm, DataError):
            end = time.monotonic() + TURN_S
            is_done = is_done or all(time.monotonic() < end for _ in work)
        if all(comm.allgather_object(is_done)):
            return
