"""The all-reduces between nodes by name; a ring, and exchanges of all pairs."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hpctrain.comm.ops import Combination
from hpctrain.comm.rail.halving import (
    allreduce_by_messages_,
    doubling_allreduce_,
    halving_allreduce_,
)
from hpctrain.comm.rail.trees import double_tree_allreduce_, tree_allreduce_
from hpctrain.comm.rail.wire import Arrival, Wire, cut, num_segments, received
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


Algorithm = Callable[[Wire, Tensor, Combination], None]
"""Replaces a flat, contiguous tensor of dtype ``lane`` by its reduction over all ranks."""


ALGORITHMS: dict[str, Algorithm] = {
    "doubling": doubling_allreduce_,
    "halving": halving_allreduce_,
    "ring": ring_allreduce_,
    "tree": tree_allreduce_,
    "double_tree": double_tree_allreduce_,
    "library": allreduce_by_messages_,  # where the MPI library cannot; else Rail calls the library
}
"""By the name that a plan gives them."""


def pairwise_alltoall_(wire: Wire, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """Send ``outgoing[r]`` to rank r, and replace ``incoming[r]`` by what rank r sends here.

    Collective. Tensors are flat and contiguous; outgoing ones may be the same tensor.
    """
    incoming[wire.rank].copy_(outgoing[wire.rank])
    for step in range(1, wire.size):
        dest, source = (wire.rank + step) % wire.size, (wire.rank - step) % wire.size
        wire.exchange(outgoing[dest], dest, incoming[source], source)


def pairwise_reduce_scatter(
    wire: Wire, parts: Sequence[Tensor], combination: Combination
) -> Tensor:
    """Combine everybody's ``parts[rank]`` on this rank. Collective.

    Parts are flat and contiguous, of dtype ``combination.lane``, alike on every rank.

    Returns:
        A new tensor of dtype ``combination.wide``, as long as this rank's part.
    """
    total = parts[wire.rank].to(combination.wide, copy=True)
    inbox = torch.empty_like(parts[wire.rank])
    for step in range(1, wire.size):
        dest, source = (wire.rank + step) % wire.size, (wire.rank - step) % wire.size
        wire.exchange(parts[dest], dest, inbox, source)
        combination.into(total, inbox)
    return total
