"""Which tensor travels in which bucket, and where in it: pure arithmetic."""

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
) -> tuple[BucketPlan, ...]:
    """Pack tensors into buckets, in the order in which they are given.

    Every tensor lies in exactly one bucket, whole, and starts at a multiple of ``align_bytes``.
    A bucket holds one dtype and takes tensors while it stays within ``bucket_bytes``; a tensor
    that is larger has a bucket to itself. Buckets are ordered by their first tensor.

    Args:
        specs: the tensors, in the order in which they become ready.
        bucket_bytes: largest bucket in bytes, without marks; None for one per dtype.
        align_bytes: a multiple of every element size.
        marks_per_tensor: elements kept free behind the last tensor, for each of them.

    Returns:
        The buckets, in the order in which they should travel.
    """
    groups: list[list[int]] = []
    used_bytes: list[int] = []
    open_of: dict[torch.dtype, int] = {}
    for index, spec in enumerate(specs):
        needed = spec.numel * spec.dtype.itemsize
        group = open_of.get(spec.dtype)
        if group is None or (
            bucket_bytes is not None and used_bytes[group] + needed > bucket_bytes
        ):
            group = open_of[spec.dtype] = len(groups)
            groups.append([])
            used_bytes.append(0)
        groups[group].append(index)
        used_bytes[group] += _round_up(needed, align_bytes)
    return tuple(_layout(specs, group, align_bytes, marks_per_tensor) for group in groups)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _layout(
    specs: Sequence[TensorSpec], group: list[int], align_bytes: int, marks_per_tensor: int
) -> BucketPlan:
    dtype = specs[group[0]].dtype
    offsets, end = [], 0
    for index in group:
        offsets.append(end)
        end += _round_up(specs[index].numel, align_bytes // dtype.itemsize)
    return BucketPlan(
        dtype=dtype,
        members=tuple(group),
        offsets=tuple(offsets),
        numel=end + marks_per_tensor * len(group),
    )
