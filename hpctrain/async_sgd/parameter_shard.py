"""Shard of a parameter server: one part of all parameters, with its optimizer state."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.async_sgd.parameter_layout import ParameterLayout, ParameterRange
from hpctrain.async_sgd.server_messages import Push, Settings
from hpctrain.comm.ops import Op, combination, combine_to, scaled_when
from hpctrain.gradients.elementwise import PieceStep
from hpctrain.gradients.rail_sums import weighted
from hpctrain.gradients.sample_count import exponent_of


class ParameterShard:
    """Stores one server's part of the parameters, and takes optimizer steps on it.

    Args:
        layout: layout of all parameters.
        number: index of the server.
        optimizer: optimizer whose rule is applied to the ranges of parameters.
    """

    def __init__(self, layout: ParameterLayout, number: int, optimizer: Optimizer) -> None:
        self._layout, self._number = layout, number
        self._ranges = list(layout.ranges(number))
        self._values, self._sums = layout.new_parts(number), layout.new_parts(number)
        self._held = self._tensors_in(self._values)
        self._stepper = PieceStep(optimizer)
        # Hooks would keep the AsyncMethod object alive while the server's thread runs.
        self._attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in {"state", "step"} and not name.endswith("_hooks")
        }

    def parts(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return views of the parts of ``flats`` that belong to this shard."""
        return self._layout.parts(flats, self._number)

    def copy_to(self, out: Sequence[Tensor]) -> None:
        """Copy the values of this shard to ``out``, one tensor per block."""
        for copy, part in zip(out, self._values, strict=True):
            copy.copy_(part)

    @contextmanager
    def on_copy(self, out: Sequence[Tensor]) -> Iterator[None]:
        """Let ``step`` update ``out`` and a copy of the state inside the block, not the shard."""
        held, state = self._held, self._stepper.state
        try:
            self._held = self._tensors_in(out)
            self._stepper.state = defaultdict(dict)
            for tensor, before in zip(self._held, held, strict=True):
                if before in state:
                    self._stepper.state[tensor] = {
                        k: v.clone() if isinstance(v, Tensor) else v
                        for k, v in state[before].items()
                    }
            yield
        finally:
            self._held, self._stepper.state = held, state

    # -- state ----------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, optimizer: Optimizer) -> None:
        """Copy this shard's part of the parameters and of ``optimizer.state`` into the shard."""
        self._stepper.state.clear()
        for own, tensor in zip(self._ranges, self._held, strict=True):
            parameter = self._layout.parameters[own.number]
            tensor.copy_(self._layout.flattened(own.number, parameter)[own.inside])
            for name, value in optimizer.state.get(parameter, {}).items():
                self._stepper.state[tensor][name] = self._part_of(name, value, own)

    def _part_of(self, name: str, value: Any, own: ParameterRange) -> Any:
        """Return a copy of an optimizer state entry, restricted to the elements in ``own``."""
        if not isinstance(value, Tensor):
            return value
        if name != "step" and value.shape == self._layout.parameters[own.number].shape:
            value = self._layout.flattened(own.number, value)[own.inside]
        return value.detach().to("cpu", copy=True)

    def state(self) -> list[tuple[int, dict[str, Any]]]:
        """Return, for each range of this shard, the parameter's index and the optimizer state."""
        both = zip(self._ranges, self._held, strict=True)
        return [(own.number, dict(self._stepper.state[tensor])) for own, tensor in both]

    # -- steps ----------------------------------------------------------------------------------

    def step(self, pushes: Sequence[Push], settings: Settings, num_missing: int = 0) -> None:
        """Take an optimizer step with the weighted mean of the gradients in ``pushes``.

        Args:
            pushes: gradients and weights of workers.
            settings: options of the parameter groups.
            num_missing: number of missing gradients, which count as zeros with the mean weight of
                ``pushes``.
        """
        having = [any(of) for of in zip(*(one.has_gradient for one in pushes), strict=True)]
        by_group: defaultdict[int, list[Tensor]] = defaultdict(list)
        grads = self._tensors_in(self._mean(pushes, num_missing))
        for own, tensor, grad in zip(self._ranges, self._held, grads, strict=True):
            if having[own.number]:
                tensor.grad = grad
                by_group[own.group].append(tensor)
        self._stepper.read(SimpleNamespace(**self._attributes | {"param_groups": settings}))  # type: ignore[arg-type]
        self._stepper.step(by_group)
        for tensor in self._held:
            tensor.grad = None

    def _mean(self, pushes: Sequence[Push], num_missing: int) -> Sequence[Tensor]:
        """Return the mean gradient of each block.

        On up to two nodes the mean is bitwise equal to the mean of ``DistributedOptimizer``.
        """
        if len(pushes) == 1 and pushes[0].weight and not num_missing:
            return pushes[0].parts  # unchanged, so that steps are bitwise equal to a plain loop
        nodes = [n for near in (True, False) if (n := [p for p in pushes if p.is_near is near])]
        top = 2.0 ** exponent_of(max(one.weight for one in pushes))  # so that no product overflows
        total = sum(sum(one.weight for one in node) for node in nodes) / top
        total += num_missing * total / len(pushes)
        scale = None if total == 1.0 else 1.0 / (total or 1.0)
        for block, out in enumerate(self._sums):
            how = combination(out.dtype, Op.SUM)
            early, late = scaled_when(scale, how) if len(nodes) > 1 else (scale, None)
            sums = [out, *(torch.empty_like(out) for _ in nodes[1:])]
            for into, node in zip(sums, nodes, strict=True):
                parts = weighted([p.parts[block] for p in node], [p.weight / top for p in node])
                combine_to(into, parts, how, early)
            if len(nodes) > 1:
                combine_to(out, sums, how, late)
        return self._sums

    def _tensors_in(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[own.block][own.place] for own in self._ranges]
