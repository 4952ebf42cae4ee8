"""Ring all-reduce: every rank sends and receives 2(N-1)/N of the message, the least possible."""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from hpctrain.comm.node.pipelining import Arrival, cut, num_segments, received
from hpctrain.comm.ops import Combination
from hpctrain.comm.rail.wire import Wire
from hpctrain.core.units import MIB

SEGMENT_BYTES = MIB
"""Large parts travel in segments: one is combined while the next one is on its way."""


def ring_allreduce_(wire: Wire, tensor: Tensor, combination: Combination) -> None:
    """Replace a flat, contiguous ``tensor`` by its reduction over the ranks of ``wire``.

    Collective. Part p of N travels the ring from rank p on and is combined in that order (it
    ends complete on rank p-1), then travels once more to be copied. 2(N-1) rounds; the time is
    about 2(N-1) a + 2(N-1)/N m b for a message of m bytes, a seconds of latency and b seconds
    per byte. 16-bit floats are rounded at each of the N-1 combinations.

    Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", the ring for all-reduce.
    Differs: a rank passes each segment of a part on as soon as it is combined.
    """
    size, rank, numel = wire.size, wire.rank, tensor.numel()
    if size == 1 or numel == 0:
        return
    num_each = num_segments(-(-numel // size) * tensor.itemsize, SEGMENT_BYTES)
    pieces = cut(tensor, size * num_each)
    ahead = min(2, num_each)
    inboxes = torch.empty(ahead, -(-numel // len(pieces)), dtype=tensor.dtype)

    def segments_of(part: int) -> list[Tensor]:
        return pieces[part % size * num_each :][:num_each]

    # What arrives in turn: parts rank-1, rank-2, ..., rank+1 to be combined with those here,
    # then rank, rank-1, ..., rank+2, complete. Each is passed on, but for the last part.
    incoming = [
        segment for step in range(2 * size - 2) for segment in segments_of(rank - 1 - step)
    ]
    num_combined = (size - 1) * num_each

    def expected() -> Iterator[Arrival]:
        for turn, segment in enumerate(incoming):
            combined = turn < num_combined
            target = inboxes[turn % ahead, : segment.numel()] if combined else segment
            yield Arrival(target, (rank - 1) % size)

    leaving = deque(wire.start_send(segment, (rank + 1) % size) for segment in segments_of(rank))
    for turn, arrived in enumerate(received(wire, expected(), ahead)):
        segment = incoming[turn]
        if turn < num_combined:
            combination.into(segment, arrived)
        if turn < len(incoming) - num_each:
            leaving.append(wire.start_send(segment, (rank + 1) % size))
        # The receive that is posted next may overwrite what this send has read.
        wire.finish(leaving.popleft())
