"""Every rank exchanges with every other one, in N-1 rounds of disjoint pairs.

Each byte travels once, straight to where it is wanted: the least traffic there can be, and the
most messages, so for large tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.comm.ops import Combination
from hpctrain.comm.rail.wire import Wire


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

    Args:
        wire: the ranks.
        parts: one for each rank, flat and contiguous, of dtype ``combination.lane``; the same
            numbers of elements on every rank.
        combination: how.

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
