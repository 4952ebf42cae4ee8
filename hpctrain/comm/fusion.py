"""Fusion of tensors into buckets: pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """What the planner needs to know of a tensor."""

    name: str
    numel: int
    dtype: torch.dtype


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
    align_bytes: int = 64,
    marks_per_tensor: int = 0,
    groups: Sequence[int | None] = (),
) -> tuple[BucketPlan, ...]:
    """Pack tensors into buckets, in the order in which they are given.

    Every tensor lies in exactly one bucket, whole, and starts at a multiple of ``align_bytes``.
    A bucket holds one dtype and takes tensors while it stays within ``bucket_bytes``; a tensor
    that is larger has a bucket to itself. Tensors of one group share a bucket of any size, apart
    from all others. Buckets are ordered by their first tensor; by their last one, which completes
    them, where there are groups.

    Args:
        specs: the tensors, in the order in which they become ready.
        bucket_bytes: largest bucket in bytes, without marks; None for one per dtype.
        align_bytes: a multiple of every element size.
        marks_per_tensor: elements kept free behind the last tensor, for each of them.
        groups: the number of the group of each tensor, None where it has none; empty for none.

    Returns:
        The buckets, in the order in which they should travel.
    """
    members: list[list[int]] = []
    used_bytes: list[int] = []
    open_of: dict[tuple[torch.dtype, int | None], int] = {}
    group_of = groups or [None] * len(specs)
    for index, (spec, group) in enumerate(zip(specs, group_of, strict=True)):
        needed = spec.numel * spec.dtype.itemsize
        limit = bucket_bytes if group is None else None
        bucket = open_of.get((spec.dtype, group))
        if bucket is None or (limit is not None and used_bytes[bucket] + needed > limit):
            bucket = open_of[spec.dtype, group] = len(members)
            members.append([])
            used_bytes.append(0)
        members[bucket].append(index)
        used_bytes[bucket] += _round_up(needed, align_bytes)
    if groups:
        members.sort(key=lambda indices: indices[-1])
    return tuple(_layout(specs, indices, align_bytes, marks_per_tensor) for indices in members)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _layout(
    specs: Sequence[TensorSpec], members: list[int], align_bytes: int, marks_per_tensor: int
) -> BucketPlan:
    dtype = specs[members[0]].dtype
    offsets, end = [], 0
    for index in members:
        offsets.append(end)
        end += _round_up(specs[index].numel, align_bytes // dtype.itemsize)
    return BucketPlan(
        dtype=dtype,
        members=tuple(members),
        offsets=tuple(offsets),
        numel=end + marks_per_tensor * len(members),
    )
