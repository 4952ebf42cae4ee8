"""Messages between ranks: what the algorithms between nodes run on, and pieces in flight."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Wire(Protocol):
    """Point to point, by rank: over MPI, or simulated.

    Tensors are flat and contiguous. Sender and receiver give the same number of elements.
    """

    rank: int
    size: int

    def start_send(self, tensor: Tensor, dest: int, tag: int = 0) -> Any:
        """Begin to send ``tensor``, which stays as it is until ``finish`` of what is returned."""

    def start_receive(self, tensor: Tensor, source: int, tag: int = 0) -> Any:
        """Begin to replace ``tensor``; nobody reads or writes it until ``finish``."""

    def finish(self, transfer: Any) -> None:
        """Return when a message under way is complete."""

    def is_finished(self, transfer: Any) -> bool:
        """Say whether it is, without waiting; once it is, ``finish`` need not be called."""

    def send(self, tensor: Tensor, dest: int, tag: int = 0) -> None:
        """Send ``tensor`` to ``dest``; it may be overwritten on return."""
        self.finish(self.start_send(tensor, dest, tag))

    def receive_(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        """Replace ``tensor`` by what ``source`` sends."""
        self.finish(self.start_receive(tensor, source, tag))

    def exchange(self, outgoing: Tensor, dest: int, incoming: Tensor, source: int) -> None:
        """Send ``outgoing`` to ``dest`` and replace ``incoming`` by what ``source`` sends."""
        arriving = self.start_receive(incoming, source)
        leaving = self.start_send(outgoing, dest)
        self.finish(arriving)
        self.finish(leaving)


class Arrival(NamedTuple):
    """A piece that will come."""

    tensor: Tensor  # where it goes
    source: int


def receives(
    wire: Wire, expected: Iterable[Arrival], ahead: int, tag: int
) -> Iterator[tuple[Any, Tensor]]:
    """Yield what is under way to the tensors of ``expected``, in order, for the caller to finish.

    The next ``ahead`` receives are posted all the time, so they travel while the caller works.
    A later arrival may go where an earlier one was ``ahead`` pieces before: it is posted when
    the caller asks for the next piece.
    """

    def start(arrival: Arrival) -> tuple[Any, Tensor]:
        return wire.start_receive(*arrival, tag), arrival.tensor

    coming = iter(expected)
    posted = deque(start(arrival) for arrival in islice(coming, ahead))
    while posted:
        yield posted.popleft()
        posted.extend(start(arrival) for arrival in islice(coming, 1))
