"""Recursive halving and doubling: few rounds and few bytes, for messages of middle size."""

import torch
from torch import Tensor

from hpctrain.comm.node.pipelining import cut
from hpctrain.comm.ops import Combination
from hpctrain.comm.rail.doubling import fold
from hpctrain.comm.rail.wire import Wire


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
