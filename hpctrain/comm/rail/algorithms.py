"""The all-reduces between nodes by name; doubling, halving, a ring, exchanges of all pairs."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.ops import Combination
from hpctrain.comm.rail.trees import double_tree_allreduce_, tree_allreduce_
from hpctrain.comm.rail.wire import Arrival, Wire, cut, num_segments, received
from hpctrain.core.units import KIB, MIB


def doubling_allreduce_(wire: Wire, tensor: Tensor, combination: Combination) -> None:
    """Replace a flat, contiguous ``tensor`` by its reduction over the ranks of ``wire``.

    Collective. In round k the ranks exchange all they have with the one 2^k further on or back:
    log2(N) rounds, m bytes each, so about log2(N) (a + m b) for a message of m bytes, a seconds
    of latency and b seconds per byte. Two more rounds if N is no power of two. Both partners
    combine the same two tensors with the lower rank's first, hence to the same bits.

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
    operations in MPICH", recursive doubling in the section on all-reduce.
    """
    if wire.size == 1 or tensor.numel() == 0:
        return
    ranks, place, other = fold(wire.rank, wire.size)
    if place is None:
        wire.send(tensor, wire.rank - 1)
        wire.receive_(tensor, wire.rank - 1)
        return
    mine, theirs = tensor, torch.empty_like(tensor)
    if other is not None:
        wire.receive_(theirs, other)
        combination.into(mine, theirs)
    distance = 1
    while distance < len(ranks):
        partner = ranks[place ^ distance]
        wire.exchange(mine, partner, theirs, partner)
        if partner < wire.rank:
            mine, theirs = theirs, mine
        combination.into(mine, theirs)
        distance *= 2
    if mine is not tensor:
        tensor.copy_(mine)
    if other is not None:
        wire.send(tensor, other)


class Fold(NamedTuple):
    """How the ranks are brought down to a power of two, as one rank sees it."""

    ranks: tuple[int, ...]  # the ones that take part
    place: int | None  # where this rank stands in ``ranks``; None if ``other`` takes part for it
    other: int | None
    """The rank for which this one takes part, or the reverse; None if there is none."""


@cache
def fold(rank: int, size: int) -> Fold:
    """Let the even ones of the first 2r ranks take part for the odd ones too.

    There are r ranks more than the power of two.
    """
    end = 2 * (size - (1 << (size.bit_length() - 1)))
    ranks = (*range(0, end, 2), *range(end, size))
    return Fold(
        ranks,
        place=ranks.index(rank) if rank in ranks else None,
        other=rank ^ 1 if rank < end else None,
    )


def halving_allreduce_(wire: Wire, tensor: Tensor, combination: Combination) -> None:
    """Replace a flat, contiguous ``tensor`` by its reduction over the ranks of ``wire``.

    Collective. A reduce-scatter in which partners send each other half of what they still have,
    then an all-gather which goes the same way back. For N a power of two: 2 log2(N) rounds and
    2(N-1)/N of the message, the least possible, so about 2 log2(N) a + 2(N-1)/N m b for a message
    of m bytes, a seconds of latency and b seconds per byte; two ranks just exchange halves.
    Other N take 3 rounds and up to 3/2 of the message more, to take in the odd ones of the first
    2r ranks (r above the power of two) and to tell them the result.

    Source: Rabenseifner 2004, "Optimization of collective reduction operations", recursive
    halving and doubling; the odd ranks: Thakur, Rabenseifner and Gropp 2005, "Optimization of
    collective communication operations in MPICH", section on reduce.
    """
    if wire.size == 1 or tensor.numel() == 0:
        return
    ranks, place, other = fold(wire.rank, wire.size)
    first, second = cut(tensor, 2)
    inbox = torch.empty_like(second)  # the larger half
    if place is None:
        _combine_half(wire, (second, first), wire.rank - 1, inbox, combination)
        wire.send(second, wire.rank - 1)
        wire.receive_(tensor, wire.rank - 1)
        return
    if other is not None:
        _combine_half(wire, (first, second), other, inbox, combination)
        wire.receive_(second, other)
    whole, distance = tensor, 1
    way_back: list[tuple[Tensor, Tensor, int]] = []
    while distance < len(ranks):
        partner = ranks[place ^ distance]
        lower, upper = cut(whole, 2)
        kept, given = (upper, lower) if place & distance else (lower, upper)
        _combine_half(wire, (kept, given), partner, inbox, combination)
        way_back.append((kept, given, partner))
        whole = kept
        distance *= 2
    for kept, given, partner in reversed(way_back):
        wire.exchange(kept, partner, given, partner)
    if other is not None:
        wire.send(tensor, other)


def _combine_half(
    wire: Wire,
    halves: tuple[Tensor, Tensor],
    partner: int,
    inbox: Tensor,
    combination: Combination,
) -> None:
    """Give ``partner`` the second of the halves and combine its half with the first."""
    kept, given = halves
    other = inbox[: kept.numel()]
    wire.exchange(given, partner, other, partner)
    combination.into(kept, other)


DOUBLING_BYTES = 32 * KIB
"""Below this, sending everything in log2(N) rounds beats sending less in twice as many."""


def allreduce_by_messages_(wire: Wire, tensor: Tensor, combination: Combination) -> None:
    """Replace a flat, contiguous ``tensor`` by its reduction over all ranks. Collective."""
    small = tensor.numel() * tensor.itemsize < DOUBLING_BYTES
    (doubling_allreduce_ if small else halving_allreduce_)(wire, tensor, combination)


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
