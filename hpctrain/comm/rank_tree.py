"""Binomial tree: reduce to rank 0, then broadcast."""

import torch
from torch import Tensor

from hpctrain.comm.ops import Combination
from hpctrain.comm.rail.wire import Wire


def tree_allreduce_(wire: Wire, tensor: Tensor, combination: Combination) -> None:
    """Replace a flat, contiguous ``tensor`` by its reduction over the ranks of ``wire``.

    Collective. A rank's children are 1, 2, 4, ... further on, up to its own lowest set bit; their
    subtrees are combined in that order. 2 ceil(log2 N) rounds of the whole message, so about
    2 log2(N) (a + m b) for a message of m bytes, a seconds of latency and b seconds per byte.
    Slower than doubling on a quiet network, but it sends only 2(N-1) messages in all.

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
    operations in MPICH", binomial tree in the sections on broadcast and reduce.
    """
    rank, size = wire.rank, wire.size
    if size == 1 or tensor.numel() == 0:
        return
    reach = rank & -rank if rank else size  # of the subtree: ranks below rank + reach
    children = [rank + (1 << k) for k in range(size.bit_length()) if 1 << k < reach]
    children = [child for child in children if child < size]
    if children:
        inbox = torch.empty_like(tensor)
        for child in children:
            wire.receive_(inbox, child)
            combination.into(tensor, inbox)
    if rank:
        wire.send(tensor, rank - reach)
        wire.receive_(tensor, rank - reach)
    for child in reversed(children):
        wire.send(tensor, child)
