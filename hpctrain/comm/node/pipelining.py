"""Pieces of a message: how it is cut, and how some are awaited while others are worked on."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from hpctrain.comm.rail.wire import Wire


class Arrival(NamedTuple):
    """A piece that will come."""

    tensor: Tensor
    """Where it goes."""
    source: int
    tag: int = 0


def cut(tensor: Tensor, num_pieces: int) -> list[Tensor]:
    """Cut a flat ``tensor`` into views that differ by one element at most; some may be empty."""
    numel = tensor.numel()
    return [
        tensor[i * numel // num_pieces : (i + 1) * numel // num_pieces] for i in range(num_pieces)
    ]


def num_segments(num_bytes: int, segment_bytes: int) -> int:
    """Return into how many segments of at most about ``segment_bytes`` a part is cut."""
    return max(1, -(-num_bytes // segment_bytes))


def received(wire: Wire, expected: Iterable[Arrival], ahead: int) -> Iterator[Tensor]:
    """Yield the tensors of ``expected`` in order, each when it has come.

    The next ``ahead`` receives are posted all the time, so they travel while the caller works.
    A later arrival may go where an earlier one was ``ahead`` pieces before: it is posted when
    the caller asks for the next piece.
    """
    coming = iter(expected)
    posted = deque(wire.start_receive(*arrival) for arrival in islice(coming, ahead))
    while posted:
        transfer = posted.popleft()
        wire.finish(transfer)
        yield transfer.tensor
        posted.extend(wire.start_receive(*arrival) for arrival in islice(coming, 1))
