"""Buckets: the flat buffers in which gradients travel, and the layout of tensors in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 256 << 10
"""One piece of every rank's bucket and the running sum stay in a core's L2 cache."""
ALIGN = 64  # slices begin at a multiple of so many elements: no cache line has two writers
_ALIGN_BYTES = 64  # tensors begin at a multiple of it, which is one of every element size


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """One message of many tensors, laid out alike on every rank."""

    flat: Tensor  # this rank's own elements, 1-D and contiguous. The sum comes back into it
    peers: tuple[Tensor, ...] = ()
    """The same bucket of every rank of the node, by local rank, mapped into this process.
    Empty when the bucket lies in private memory."""
    chunks: tuple[tuple[Tensor, ...], ...] = ()
    """The slice that this rank sums, cut into pieces that fit the cache: one view per peer."""
    number: int = 0
    """Counts the buckets of a communicator: the ranks compare it before they reduce."""
    owner: object = None  # the node level that made it; None in private memory

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.flat.numel()

    @property
    def device(self) -> torch.device:
        """Where its elements are."""
        return self.flat.device

    def part(self, numel: int, dtype: torch.dtype, first_byte: int = 0) -> "Bucket":
        """Return ``numel`` values of ``dtype`` in the same memory. Not collective.

        All ranks that reduce it have made it alike. It is valid as long as this bucket is.
        """
        own = slice(first_byte, first_byte + numel * dtype.itemsize)
        flat = self.flat.view(torch.uint8)[own].view(dtype)
        if not self.peers:
            return Bucket(flat, number=self.number, owner=self.owner)
        local_rank = next(rank for rank, peer in enumerate(self.peers) if peer is self.flat)
        peers = [peer.view(torch.uint8)[own].view(dtype) for peer in self.peers]
        peers[local_rank] = flat
        chunks = chunks_of(peers, local_rank)
        return Bucket(flat, tuple(peers), chunks, self.number, self.owner)


def slice_bounds(numel: int, num_parts: int, part: int, unit: int = ALIGN) -> slice:
    """Cut ``numel`` elements into ``num_parts`` slices that differ by at most one ``unit``.

    By default that is a cache line. Slices begin at multiples of it.
    """
    units = -(-numel // unit)
    first, last = part * units // num_parts, (part + 1) * units // num_parts
    return slice(min(first * unit, numel), min(last * unit, numel))


def chunks_of(
    peers: Sequence[Tensor], local_rank: int, num_bytes: int = CHUNK_BYTES
) -> tuple[tuple[Tensor, ...], ...]:
    """Cut this rank's slice of a buffer that every peer has into pieces, one view per peer."""
    own = slice_bounds(peers[0].numel(), len(peers), local_rank)
    if own.start == own.stop:
        return ()
    numel = num_bytes // peers[0].itemsize
    return tuple(zip(*(peer[own].split(numel) for peer in peers), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """What the planner needs to know of a tensor."""

    name: str
    numel: int
    dtype: torch.dtype
    device: int = 0  # which of the devices that a rank has tensors on; on all ranks the same


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlan:
    """The layout of one bucket: tensor ``members[i]`` begins at element ``offsets[i]``."""

    dtype: torch.dtype
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


def plan_buckets(
    specs: Sequence[TensorSpec],
    bucket_bytes: int | None,
    *,
    marks_per_tensor: int = 0,
    groups: Sequence[int | None] = (),
) -> tuple[BucketPlan, ...]:
    """Pack tensors into buckets, in the order in which they become ready and should travel.

    Every tensor lies in exactly one bucket, whole, and starts at a multiple of 64 bytes. A bucket
    holds one dtype of one device and takes tensors while it stays within ``bucket_bytes``; a
    tensor that is larger has a bucket to itself. Tensors of one group share a bucket of any size,
    apart from all others. Buckets are ordered by their first tensor; by their last one, which
    completes them, where there are groups.

    ``bucket_bytes`` is without marks, None for one bucket per dtype and device;
    ``marks_per_tensor`` elements are kept free behind the last tensor for each of them; ``groups``
    has the number of the group of each tensor, None where it has none; empty for none.
    """
    members: list[list[int]] = []
    used_bytes: list[int] = []
    open_of: dict[tuple[torch.dtype, int, int | None], int] = {}
    group_of = groups or [None] * len(specs)
    for index, (spec, group) in enumerate(zip(specs, group_of, strict=True)):
        needed = spec.numel * spec.dtype.itemsize
        limit = bucket_bytes if group is None else None
        key = spec.dtype, spec.device, group
        bucket = open_of.get(key)
        if bucket is None or (limit is not None and used_bytes[bucket] + needed > limit):
            bucket = open_of[key] = len(members)
            members.append([])
            used_bytes.append(0)
        members[bucket].append(index)
        used_bytes[bucket] += _round_up(needed, _ALIGN_BYTES)
    if groups:
        members.sort(key=lambda indices: indices[-1])
    return tuple(_layout(specs, indices, marks_per_tensor) for indices in members)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _layout(specs: Sequence[TensorSpec], members: list[int], marks_per_tensor: int) -> BucketPlan:
    dtype = specs[members[0]].dtype
    offsets, end = [], 0
    for index in members:
        offsets.append(end)
        end += _round_up(specs[index].numel, _ALIGN_BYTES // dtype.itemsize)
    return BucketPlan(
        dtype=dtype,
        members=tuple(members),
        offsets=tuple(offsets),
        numel=end + marks_per_tensor * len(members),
    )
