"""The sum of a node: a slice for each of its ranks, in pieces that stay in the cache."""

from collections.abc import Sequence

from torch import Tensor

from hpctrain.comm.ops import Combination

CHUNK_BYTES = 256 << 10
"""One piece of every rank's bucket and the running sum stay in a core's L2 cache."""
ALIGN = 64
"""Slices begin at a multiple of so many elements: no cache line has two writers."""


def slice_bounds(numel: int, num_parts: int, part: int) -> slice:
    """Cut ``numel`` elements into ``num_parts`` slices that differ by at most one cache line."""
    lines = -(-numel // ALIGN)
    first, last = part * lines // num_parts, (part + 1) * lines // num_parts
    return slice(min(first * ALIGN, numel), min(last * ALIGN, numel))


def chunks_of(peers: Sequence[Tensor], local_rank: int) -> tuple[tuple[Tensor, ...], ...]:
    """Cut this rank's slice of a buffer that every peer has into pieces, one view per peer."""
    own = slice_bounds(peers[0].numel(), len(peers), local_rank)
    if own.start == own.stop:
        return ()
    numel = CHUNK_BYTES // peers[0].itemsize
    return tuple(zip(*(peer[own].split(numel) for peer in peers), strict=True))


def combine(parts: Sequence[Tensor], combination: Combination, scale: float | None) -> Tensor:
    """Combine the ranks' pieces in rank order, times ``scale``.

    Returns:
        The first piece, which is overwritten; a wider tensor where one rounding wants it.
    """
    first, *others = (_lane(part, combination) for part in parts)
    total = first if combination.wide is first.dtype else first.to(combination.wide)
    for other in others:
        combination.into(total, other)
    return total if scale is None else total.mul_(scale)


def combine_to(
    out: Tensor, parts: Sequence[Tensor], combination: Combination, scale: float | None
) -> None:
    """Combine the ranks' pieces in rank order, times ``scale``, and leave them as they are.

    Args:
        out: the result; may be one of the first two pieces.
        parts: one for each rank.
        combination: what to do with the values.
        scale: factor of the result.
    """
    if combination.wide is not combination.lane or len(parts) == 1:
        total = parts[0].to(combination.wide, copy=True)
        for other in parts[1:]:
            combination.into(total, other)
        out.copy_(total if scale is None else total.mul_(scale))
        return
    combination.of_two(parts[0], parts[1], out)
    for other in parts[2:]:
        combination.into(out, other)
    if scale is not None:
        out.mul_(scale)


def spread(total: Tensor, parts: Sequence[Tensor], combination: Combination) -> None:
    """Write a sum into the pieces of all ranks."""
    for part in parts:
        lane = _lane(part, combination)
        if lane.data_ptr() != total.data_ptr():
            lane.copy_(total)


def _lane(part: Tensor, combination: Combination) -> Tensor:
    return part if part.dtype is combination.lane else part.view(combination.lane)
