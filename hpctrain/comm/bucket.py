"""Buckets: flat buffers in which gradients are reduced, and the layout of tensors in them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 256 << 10
"""Size of a chunk: the sum and the chunk being added fit the L2 cache of a core."""
ALIGN = 64  # slices begin at multiples of this many elements: no cache line has two writers
_ALIGN_BYTES = 64  # tensors begin at multiples of this, a multiple of every element size


@dataclass(frozen=True, eq=False)
class Bucket:
    """A flat buffer of many tensors, with the same layout on every rank."""

    flat: Tensor  # elements of this rank, 1-D and contiguous; replaced by the sum
    peers: tuple[Tensor, ...] = ()
    """The bucket of every rank of the node, by local rank, mapped into this process; empty if the
    bucket is in private memory."""
    chunks: tuple[tuple[Tensor, ...], ...] = ()
    """The slice that this rank sums, in chunks that fit the cache, each with one view per peer."""
    number: int = 0
    """Index of the bucket in its communicator, from 1, which ranks compare before a reduction."""
    owner: object = None  # ``SharedMemory`` that created the bucket, or None
    sums: dict[Any, Any] = field(default_factory=dict, repr=False)
    """The reductions that ``owner`` has prepared, by operation and factor."""

    @cached_property
    def addresses(self) -> Any:
        """Addresses of the buckets in ``peers``, as an array for the compiled kernel."""
        return (ctypes.c_void_p * len(self.peers))(*(peer.data_ptr() for peer in self.peers))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.flat.numel()

    @property
    def device(self) -> torch.device:
        """Device of the elements."""
        return self.flat.device

    def part(self, numel: int, dtype: torch.dtype, first_byte: int = 0) -> "Bucket":
        """Return a bucket of ``numel`` elements of ``dtype`` in the memory of this bucket. Local.

        All ranks that reduce the part must create it with the same arguments. The part is valid
        as long as this bucket.
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
    """Divide ``numel`` elements into ``num_parts`` slices; return the bounds of slice ``part``.

    Slices begin at multiples of ``unit`` elements, and their sizes differ by at most one unit.
    """
    units = -(-numel // unit)
    first, last = part * units // num_parts, (part + 1) * units // num_parts
    return slice(min(first * unit, numel), min(last * unit, numel))


def chunks_of(
    peers: Sequence[Tensor], local_rank: int, num_bytes: int = CHUNK_BYTES
) -> tuple[tuple[Tensor, ...], ...]:
    """Divide slice ``local_rank`` into chunks of ``num_bytes``, each with one view per peer.

    ``peers`` are the buckets of the ranks of a node, by local rank.
    """
    own = slice_bounds(peers[0].numel(), len(peers), local_rank)
    if own.start == own.stop:
        return ()
    numel = num_bytes // peers[0].itemsize
    return tuple(zip(*(peer[own].split(numel) for peer in peers), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Properties of a tensor from which ``plan_buckets`` chooses a bucket."""

    name: str
    numel: int
    dtype: torch.dtype
    device: int = 0  # index among the devices of a rank; the same on all ranks


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
    """Assign tensors to buckets, in the order in which their gradients become ready.

    Every tensor is stored whole in one bucket and starts at a multiple of 64 bytes. A bucket
    holds tensors of one dtype and device up to ``bucket_bytes``; a larger tensor has its own
    bucket. The tensors of a group share a bucket of any size that contains no other tensors.
    Buckets are ordered by their first tensor or, with groups, by their last tensor.

    Args:
        specs: the tensors.
        bucket_bytes: largest bucket in bytes, without marks; None for one bucket per dtype and
            device.
        marks_per_tensor: number of marks per tensor. Marks are elements after the last tensor of a
            bucket, in which each rank records for which tensors it has a gradient.
        groups: index of the group of each tensor, None for no group; empty without groups.

    Returns:
        The layout of each bucket.
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
