"""Search for the parameters of a divided model, and for the axes of its ranks."""

import weakref
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hpctrain.parallel.guard_axes import Axis, GuardLayout
from hpctrain.parallel.guard_facts import Named

# Compared by identity, since the known layout of a stage without parameters is equal to it.
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
        """Groups of ranks with replicas of the plain parameters: group, device type, and whether
        gradients differ until the ranks average them before a step."""
        self._groups: dict[tuple[int, ...], tuple[Any, str]] = {}
        """Group and device type of each axis of the DTensors found so far, by ranks."""
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
        """Return the layout of the current parameters; FSDP replaces them during forward."""
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
        """Return the layout of ``named``, first the axes with replicated parameters."""
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
