"""Partition of writing: replicated state is split by bytes, sharded state stays."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from hpctrain.checkpoint.format.shard import Shard
from hpctrain.core.units import MIB

WHOLE_BYTES = MIB
"""Smaller tensors are not cut."""

Parts = dict[int, Shard]
"""What each writing rank writes of one tensor."""


def divide(tensors: Mapping[str, tuple[Sequence[int], int]], num_ranks: int) -> dict[str, Parts]:
    """Split tensors over the ranks so that each writes about the same number of bytes.

    The tensors, in their order, are one stretch of bytes that is cut into equal parts; a cut
    inside a large tensor moves to the next row, one inside a small tensor to its end.

    Args:
        tensors: shape and bytes of an element, by path.
        num_ranks: that write.
    """
    total = sum(math.prod(shape) * itemsize for shape, itemsize in tensors.values())
    cuts = [total * rank // num_ranks for rank in range(num_ranks + 1)]
    divided, start = {}, 0
    for path, (shape, itemsize) in tensors.items():
        num_bytes = math.prod(shape) * itemsize
        around = [min(max(cut - start, 0), num_bytes) for cut in cuts]
        divided[path] = _cut(tuple(shape), num_bytes, around)
        start += num_bytes
    return divided


def _cut(shape: tuple[int, ...], num_bytes: int, cuts: Sequence[int]) -> Parts:
    shares = [stop - start for start, stop in pairwise(cuts)]
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    if num_bytes < WHOLE_BYTES or dim is None:
        return {shares.index(max(shares)): Shard.whole(shape)}
    row_bytes = num_bytes // shape[dim]
    rows = [round(cut / row_bytes) for cut in cuts]
    parts = {}
    for rank, (first, last) in enumerate(pairwise(rows)):
        if first < last:
            offset = tuple(first if at == dim else 0 for at in range(len(shape)))
            size = (*shape[:dim], last - first, *shape[dim + 1 :])
            parts[rank] = Shard(shape, offset, size)
    return parts


def owners(pieces: Sequence[Mapping[str, Shard]]) -> dict[str, Parts]:
    """Choose who writes each piece of sharded tensors: copies of one are written once.

    Args:
        pieces: what each rank holds, by path.
    """
    holders: dict[tuple[str, Shard], list[int]] = {}
    for rank, held in enumerate(pieces):
        for path, shard in held.items():
            holders.setdefault((path, shard), []).append(rank)
    chosen: dict[str, Parts] = {}
    for number, ((path, shard), ranks) in enumerate(holders.items()):
        parts = chosen.setdefault(path, {})
        if shard.numel or not shard.global_shape:
            parts[ranks[number % len(ranks)]] = shard
    return chosen
