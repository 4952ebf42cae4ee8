"""The interface through which algorithms between nodes send and receive messages."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Wire(Protocol):
    """Sends and receives messages between ranks, by MPI or in a simulation.

    Tensors are flat and contiguous. Sender and receiver give the same number of elements.
    """

    rank: int
    size: int

    def start_send(self, tensor: Tensor, dest: int, tag: int = 0) -> Any:
        """Start sending ``tensor``, which must not change until ``finish`` of the result."""

    def start_receive(self, tensor: Tensor, source: int, tag: int = 0) -> Any:
        """Start receiving into ``tensor``, which must not be used until ``finish``."""

    def finish(self, transfer: Any) -> None:
        """Wait until a message in flight is complete."""

    def is_finished(self, transfer: Any) -> bool:
        """Return whether a message is complete; after True, ``finish`` is not needed."""

    def send(self, tensor: Tensor, dest: int, tag: int = 0) -> None:
        """Send ``tensor`` to ``dest``; on return, the caller may overwrite ``tensor``."""
        self.finish(self.start_send(tensor, dest, tag))

    def receive_(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        """Receive ``tensor`` from ``source``."""
        self.finish(self.start_receive(tensor, source, tag))

    def exchange(self, outgoing: Tensor, dest: int, incoming: Tensor, source: int) -> None:
        """Send ``outgoing`` to ``dest`` and receive ``incoming`` from ``source``."""
        arriving = self.start_receive(incoming, source)
        leaving = self.start_send(outgoing, dest)
        self.finish(arriving)
        self.finish(leaving)


class Arrival(NamedTuple):
    """A message to receive: the tensor that receives it, and its sender."""

    tensor: Tensor  # receives the piece
    source: int


def receives(
    wire: Wire, expected: Iterable[Arrival], ahead: int, tag: int
) -> Iterator[tuple[Any, Tensor]]:
    """Post receives for ``expected``; yield each transfer, in order, for the caller to finish.

    The next ``ahead`` receives are always posted, so that messages arrive while the caller
    computes. A message may use the tensor of the message ``ahead`` positions earlier, since the
    later receive is posted only when the caller requests the next transfer.
    """

    def start(arrival: Arrival) -> tuple[Any, Tensor]:
        return wire.start_receive(*arrival, tag), arrival.tensor

    coming = iter(expected)
    posted = deque(start(arrival) for arrival in islice(coming, ahead))
    while posted:
        yield posted.popleft()
        posted.extend(start(arrival) for arrival in islice(coming, 1))
