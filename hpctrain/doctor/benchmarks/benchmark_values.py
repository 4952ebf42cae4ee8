"""Values for which every operation is exact in every dtype, so that each element can be checked.

The values of a rank repeat after ``PERIOD`` elements: what all ranks make of them is worked out
for one period, in whole numbers, and compared bit by bit with all the others.
"""

from collections.abc import Callable, Iterator
from functools import reduce

import torch
from torch import Tensor

from hpctrain.comm.ops import Op

PERIOD = 61
"""A prime: no slice, chunk or cache line of any size has the same values as the next one."""
_TILE_PERIODS = 1 << 14
"""Periods that are written or compared at once: 1 Mi elements."""

_Fold = Callable[[Tensor, Tensor], Tensor]
_FOLDS: dict[Op, _Fold] = {
    Op.SUM: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


def values_of(rank: int, size: int, dtype: torch.dtype, op: Op = Op.SUM) -> Tensor:
    """Return a period of the values of ``rank``, one of ``size`` ranks, of ``dtype``."""
    return _whole(rank, size, dtype, op).to(dtype)


def combined(size: int, dtype: torch.dtype, op: Op) -> Tensor:
    """Return a period of what ``op`` makes of the values of all ranks, of ``dtype``."""
    ranks = (_whole(rank, size, dtype, op) for rank in range(size))
    return reduce(_FOLDS[op], ranks).to(dtype)


def write(target: Tensor, period: Tensor, start: int = 0) -> None:
    """Fill flat ``target`` with repetitions of ``period``, from its element ``start`` on."""
    for chunk, tile in _tiles(target, period, start):
        chunk.copy_(tile)


def num_wrong(values: Tensor, period: Tensor, start: int = 0) -> int:
    """Count the elements of flat ``values`` that ``write`` would change."""
    return sum(
        int((chunk != tile).any(dim=1).sum()) for chunk, tile in _tiles(values, period, start)
    )


def _whole(rank: int, size: int, dtype: torch.dtype, op: Op) -> Tensor:
    """Return the values as whole numbers; bool takes what is not 0 as true."""
    place = torch.arange(PERIOD)
    if dtype is torch.bool:
        # True everywhere in a few places only, so that "and" and "or" both find something.
        return ((place + rank) % (size + 1) != 0).long()
    if op is Op.SUM:
        # Where the sum of all would not be exact, only one rank of every `stride` adds to it.
        limit = _largest_exact(dtype)
        stride = -(-size // limit)
        values = (3 * place + rank) % (limit // -(-size // stride) + 1)
        return values * ((place + rank) % stride == 0)
    if op is Op.PRODUCT:
        return 1 + ((place + rank) % 2) * (rank < 3)
    return (3 * place + 5 * rank) % 8


def _largest_exact(dtype: torch.dtype) -> int:
    """Return a whole number up to which ``dtype`` holds all others."""
    if dtype.is_floating_point or dtype.is_complex:
        return min(round(2 / torch.finfo(dtype).eps), 1 << 20)
    return min(torch.iinfo(dtype).max, 1 << 20)


def _tiles(flat: Tensor, period: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of ``flat`` and what belongs there, as bytes: a row per element."""
    rows = flat.view(torch.uint8).view(-1, flat.itemsize)
    tile = period.roll(-(start % PERIOD)).view(torch.uint8).view(PERIOD, flat.itemsize)
    tile = tile.repeat(min(_TILE_PERIODS, -(-len(rows) // PERIOD)), 1)
    for chunk in rows.split(max(len(tile), 1)):
        yield chunk, tile[: len(chunk)]
