"""Divide the work of a data tool among ranks; an error of one rank stops all ranks."""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar, cast

from hpctrain.comm.agreement import agreed, is_any
from hpctrain.core.errors import DataError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

T = TypeVar("T")

Advance = Callable[[int], None]
"""Function that is called with the number of samples or bytes done since its last call."""
Start = Callable[[int], Advance]  # called once, with the number of samples or bytes of this rank

TURN_S = 2.0  # seconds of work between two synchronizations of the ranks


class _OneRank:
    """Communicator of a single process with the methods that tools need, without torch."""

    rank, size = 0, 1

    def allgather_object(self, value: object) -> list[object]:
        return [value]

    def broadcast_object(self, value: object) -> object:
        return value

    def barrier(self) -> None:
        pass


def or_alone(comm: "Communicator | None") -> "Communicator":
    """Return ``comm``, or a communicator of this process alone if ``comm`` is None."""
    return comm or cast("Communicator", _OneRank())


def followed(start: Start | None, total: int) -> Advance:
    """Return the function ``start(total)``, which reports progress; without ``start``, a no-op."""
    return start(total) if start else lambda _: None


def in_turns(comm: "Communicator", pieces: Iterable[T], work: Callable[[T], object]) -> None:
    """Do the work of this rank in pieces, until all ranks are done or one rank fails.

    Collective. The ranks synchronize after about ``TURN_S`` seconds of work, so that no rank waits
    longer than the time limit of collective operations. Raises ``DataError`` on every rank: the
    work of a rank raised a ``DataError``.
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
        if not is_any(comm, mine=not is_done):
            return
