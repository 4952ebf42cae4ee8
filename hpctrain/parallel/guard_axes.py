"""Groups of ranks along which a guard compares, and the collectives over a group."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hpctrain.comm.agreement import differing, gather_distinct
from hpctrain.parallel.guard_facts import Named


class Axis(NamedTuple):
    """Group of ranks that compare operations, with the parameters that the ranks replicate."""

    group: Any
    device: str
    replicated: Named
    is_stages: bool = False
    is_averaged: bool = False  # whether gradients of replicas differ until the step
    is_replica: bool = False  # whether a rank has all parameters, and may change its copy


class GuardLayout(NamedTuple):
    """Current parameters of a model, and the axes along which ranks compare them."""

    named: Named
    axes: Sequence[Axis]
    watched: Named
    """Parameters that all ranks of all axes except the stages hold, as a whole or in part."""

    @property
    def stages(self) -> list[Axis]:
        """Axis of the pipeline stages; empty without a pipeline."""
        return [axis for axis in self.axes if axis.is_stages]

    def in_order(self) -> Iterator[Axis]:
        """Yield all axes except the stages, so that every rank learns of each difference.

        Values of replicas are compared along one axis at a time, so a difference that is found
        along a later axis is sent along the earlier axes once more.
        """
        first = [axis for axis in self.axes if axis.replicated]
        yield from first
        yield from first[:-1]
        yield from (axis for axis in self.axes if not (axis.replicated or axis.is_stages))


def maxima(words: Sequence[int], axis: Axis) -> list[int]:
    """Return the maximum of each word over the ranks of ``axis``. Collective over the axis."""
    there = torch.tensor(words, dtype=torch.int64, device=axis.device)
    dist.all_reduce(there, dist.ReduceOp.MAX, group=axis.group)
    found: list[int] = there.tolist()
    return found


def gathered(one: object, axis: Axis) -> list[Any]:
    """Return the objects of all ranks of ``axis``. Collective over the axis."""
    found: list[Any] = [None] * dist.get_world_size(axis.group)
    dist.all_gather_object(found, one, group=axis.group)
    return found


def difference(mine: Mapping[str, str], axis: Axis) -> str:
    """Return the first name whose texts differ between ranks, with texts and ranks, or ""."""
    of_ranks: list[Mapping[str, str]] = [{} for _ in range(dist.get_world_size())]
    ranks = dist.get_process_group_ranks(axis.group)
    for rank, found in zip(
        ranks, gather_distinct(partial(gathered, axis=axis), mine), strict=False
    ):
        of_ranks[rank] = found or {}
    return next((f"{name} ({seen})" for name, seen in differing(of_ranks).items()), "")
