"""Recursive doubling: an all-reduce of few rounds, for small messages."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.ops import Combination
from hpctrain.comm.rail.wire import Wire


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

    ranks: tuple[int, ...]
    """The ones that take part."""
    place: int | None
    """Where this rank stands in ``ranks``; None if ``other`` takes part for it."""
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
