"""Parameters of a divided model, axes along which it is divided, collectives over an axis."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hpctrain.comm.agreement import differing, gather_distinct
from hpctrain.parallel.guard_facts import Named


class Axis(NamedTuple):
    """Group of ranks that compare operations, and the parameters that are equal on these ranks."""

    group: Any
    device: str
    replicated: Named
    is_stages: bool = False
    is_averaged: bool = False  # whether gradients of replicas differ until the step
    is_replica: bool = False  # whether each rank has its own copy of all parameters


class GuardLayout(NamedTuple):
    """Current parameters of a model, and the axes along which ranks compare them."""

    named: Named
    axes: Sequence[Axis]
    watched: Named
    """Parameters of which each rank of each axis, except the stages, has the whole or a part."""

    @property
    def stages(self) -> list[Axis]:
        """Axis of the pipeline stages; empty without a pipeline."""
        return [axis for axis in self.axes if axis.is_stages]

    def in_order(self) -> Iterator[Axis]:
        """Yield all axes except the stages, some twice, so that all ranks get each difference.

        Values of replicas are compared along one axis after another. A difference along a later
        axis reaches the ranks of an earlier axis only if the earlier axis is yielded again.
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
    """Return the first name in ``mine`` whose text differs between the ranks of ``axis``.

    The result also contains the texts and their ranks; it is empty if no text differs. Collective
    over the axis.
    """
    of_ranks: list[Mapping[str, str]] = [{} for _ in range(dist.get_world_size())]
    ranks = dist.get_process_group_ranks(axis.group)
    for rank, found in zip(
        ranks, gather_distinct(partial(gathered, axis=axis), mine), strict=False
    ):
        of_ranks[rank] = found or {}
    return next((f"{name} ({seen})" for name, seen in differing(of_ranks).items()), "")


# Compared by identity, because the layout of a stage without parameters is equal to _UNKNOWN.
_UNKNOWN = GuardLayout((), (), ())


class LayoutFinder:
    """Caches the layout of a model until modules or parameters change.

    Args:
        model: model to search for parameters.
        stages: mesh of the pipeline; None without a pipeline.
    """

    def __init__(self, model: nn.Module, stages: DeviceMesh | None) -> None:
        self._model, self._stages = weakref.ref(model), stages
        self.replicas: list[tuple[Any, str, bool]] = []
        """For each group of ranks with replicas of the plain parameters: the group, its device
        type, and whether gradients differ until the ranks average them before a step."""
        self._groups: dict[tuple[int, ...], tuple[Any, str]] = {}
        """By ranks: group and device type of each axis of the DTensors found so far."""
        self.refresh()

    @property
    def has_stages(self) -> bool:
        """Whether the model is a stage of a pipeline."""
        return self._stages is not None

    def refresh(self) -> None:
        """Discard cached modules and layout; called after modules of the model have changed."""
        self._modules: list[tuple[str, nn.Module]] = []
        self.layout = _UNKNOWN

    def now(self) -> GuardLayout:
        """Return the layout of the current parameters, which FSDP replaces during forward."""
        named, before = self.named(), self.layout.named
        is_known = self.layout is not _UNKNOWN and len(named) == len(before)
        if not is_known or any(p is not q for (_, p), (_, q) in zip(named, before, strict=True)):
            self.layout = self._found(named)
        return self.layout

    def named(self) -> Named:
        """Return the current parameters with their names."""
        model = self._model()
        if not self._modules and model is not None:
            self._modules = [(f"{name}." * bool(name), one) for name, one in model.named_modules()]
        held = (
            (prefix + name, p)
            for prefix, module in self._modules
            for name, p in vars(module)["_parameters"].items()  # quicker than named_parameters()
            if p is not None
        )
        return list({id(p): (name, p) for name, p in held}.values())

    def _found(self, named: Named) -> GuardLayout:
        """Return the layout of the parameters ``named``.

        Axes with replicated parameters are before other axes; the axis of the stages is last.
        """
        replicated: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        groups_of: dict[str, set[Any]] = {}
        for name, p in named:
            groups_of[name] = set()
            if not isinstance(p, DTensor):
                continue
            for dim, placement in enumerate(p.placements):
                group = p.device_mesh.get_group(dim)
                ranks = tuple(dist.get_process_group_ranks(group))
                groups_of[name].add(ranks)
                self._groups.setdefault(ranks, (group, p.device_mesh.device_type))
                if isinstance(placement, Replicate):
                    replicated.setdefault(ranks, []).append((name, p))
        axes = [Axis(*group, replicated.get(ranks, ())) for ranks, group in self._groups.items()]
        axes += [
            Axis(group, device, named, is_averaged=is_averaged, is_replica=True)
            for group, device, is_averaged in self.replicas
        ]
        axes.sort(key=lambda axis: not axis.replicated)
        wanted = {*self._groups}
        watched = [
            (n, p) for n, p in named if groups_of[n] == wanted and (wanted or self.replicas)
        ]
        if self._stages is not None:
            group, device = self._stages.get_group(), self._stages.device_type
            axes.append(Axis(group, device, (), is_stages=True))
        return GuardLayout(named, [a for a in axes if dist.get_world_size(a.group) > 1], watched)
