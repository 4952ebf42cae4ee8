"""Collect the gradients and buffers of a step, and reset them, after each micro-shard."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter


class StepValues:
    """Collects the gradients and buffers after each micro-shard.

    An entry is the index of a parameter or, after the parameters, of a buffer. The constructor
    clears the gradients and copies the buffers. Every micro-shard starts with these copies.

    Args:
        model: module whose buffers are restored.
        parameters: parameters whose gradients are taken.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[Parameter] = ()) -> None:
        found: dict[int, tuple[nn.Module, str, Tensor]] = {}
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                found.setdefault(id(buffer), (module, name, buffer))
        self._parameters, self._places = parameters, list(found.values())
        self._start = [buffer.detach().clone() for _, _, buffer in self._places]
        for parameter in parameters:
            parameter.grad = None

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._parameters) + len(self._places)

    def take(self) -> tuple[list[Tensor | None], dict[int, Tensor]]:
        """Return the gradients and buffers after a micro-shard, and restore the buffers.

        Returns:
            For each entry, the gradient or the changed floating-point buffer, or None without
            a gradient or change; and a dictionary of the changed integer buffers, by entry.
            Each tensor has its own memory.
        """
        values: list[Tensor | None] = []
        memories: set[int] = set()
        for parameter in self._parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                memory = gradient.untyped_storage().data_ptr()
                if memory in memories:  # autograd may return two views of one tensor
                    gradient = gradient.clone()
                memories.add(memory)
            values.append(gradient)
        counters = {}
        for (module, name, _), start in zip(self._places, self._start, strict=True):
            now, entry = getattr(module, name).detach(), len(values)
            # Values are compared, since batch_norm does not count its writes to the statistics.
            changed = None if torch.equal(now, start) else now.clone()
            has_mean = start.is_floating_point() or start.is_complex()
            values.append(changed if has_mean else None)
            if changed is not None:
                self._put(entry, start)
                if not has_mean:
                    counters[entry] = changed
        return values, counters

    @torch.no_grad()
    def restore(self) -> None:
        """Set all buffers to their values at the start of the step."""
        for entry, start in enumerate(self._start, len(self._parameters)):
            self._put(entry, start)

    def absent(self, entry: int, level: int) -> Tensor:
        """Return the sum of an entry over ``2**level`` micro-shards that have no value.

        A gradient without a value is zero; a buffer without a value is unchanged since the start.
        """
        if entry < len(self._parameters):
            return torch.zeros_like(self._parameters[entry])
        return self._start[entry - len(self._parameters)].mul(2**level)

    def settle(
        self, sums: Sequence[Tensor | None], scale: float, counters: Mapping[int, Tensor]
    ) -> None:
        """Set gradients and floating-point buffers to ``sums`` times ``scale``.

        ``counters`` maps entries of integer buffers to the new values.
        """
        for entry, total in enumerate(sums):
            if total is not None:
                self._put(entry, total.mul_(scale))
        for entry, counter in counters.items():
            self._put(entry, counter)

    def _put(self, entry: int, value: Tensor) -> None:
        """Set the value of an entry; undo the replacement of a buffer by another tensor."""
        if entry < len(self._parameters):
            self._parameters[entry].grad = value
            return
        module, name, buffer = self._places[entry - len(self._parameters)]
        buffer.detach().copy_(value)
        if getattr(module, name) is not buffer:
            setattr(module, name, buffer)
