"""What a step calculates from each micro-shard, and sums: gradients, then buffers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hpctrain.gradients.buffer_states import BufferStates


class StepValues:
    """The gradients of some parameters and the buffers of their model, in one row of entries."""

    def __init__(self, model: nn.Module, parameters: Sequence[Parameter]) -> None:
        """Note the buffers of the start of the step."""
        self._parameters = parameters
        self._buffers = BufferStates(model)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._parameters) + len(self._buffers)

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def take(self) -> tuple[list[Tensor | None], dict[int, Tensor]]:
        """Take what forward and backward of a micro-shard have left, and put the buffers back.

        Returns:
            Entry by entry, memory that nobody else has: a gradient; a changed buffer that has a
            mean; None for all else. Then the changed buffers that have none, by entry.
        """
        values: list[Tensor | None] = []
        memories: set[int] = set()
        for parameter in self._parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                memory = gradient.untyped_storage().data_ptr()
                if memory in memories:  # autograd may hand out two views of one tensor
                    gradient = gradient.clone()
                memories.add(memory)
            values.append(gradient)
        counters = {}
        for entry, buffer in enumerate(self._buffers.take()):
            has_mean = self._buffers.has_mean(entry)
            values.append(buffer if has_mean else None)
            if buffer is not None and not has_mean:
                counters[len(self._parameters) + entry] = buffer
        return values, counters

    def absent(self, entry: int, level: int) -> Tensor:
        """Return what 2^level micro-shards without a value sum to: no gradient, an old buffer."""
        if entry < len(self._parameters):
            return torch.zeros_like(self._parameters[entry])
        return self._buffers.start(entry - len(self._parameters)).mul(2**level)

    def settle(
        self, sums: Sequence[Tensor | None], scale: float, counters: Mapping[int, Tensor]
    ) -> None:
        """Give parameters and buffers the sums times ``scale``; other buffers ``counters``."""
        for entry, total in enumerate(sums):
            if total is None:
                continue
            total.mul_(scale)
            if entry < len(self._parameters):
                self._parameters[entry].grad = total
            else:
                self._buffers.put(entry - len(self._parameters), total)
        for entry, counter in counters.items():
            self._buffers.put(entry - len(self._parameters), counter)
