"""What a rank has of its own while ranks take steps of their own: parameters, buffers, state."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.comm.communicator import Communicator
from hpctrain.sync.averaging import NamedTensors


class Replica:
    """The tensors of a model and its optimizer that have a mean over ranks."""

    def __init__(self, comm: Communicator, model: nn.Module, optimizer: Optimizer) -> None:
        self._comm, self._model, self._optimizer = comm, model, optimizer

    def parameters(self, names: Collection[str] | None = None) -> NamedTensors:
        """Return the parameters that are trained, or some of them; others stay equal anyway."""
        return [
            (name, parameter.detach())
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and (names is None or name in names)
        ]

    def buffers(self) -> NamedTensors:
        """Return buffers such as running means; counters and truth values have no mean."""
        return [(name, b) for name, b in self._model.named_buffers() if b.is_floating_point()]

    def state(self) -> NamedTensors:
        """Return the optimizer's state of each parameter, but for numbers of steps."""
        named = [
            (f"group {g}, parameter {i}", parameter)
            for g, group in enumerate(self._optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
        ]
        return [
            (f"{name}, {key}", value)
            for name, parameter in named
            for key, value in sorted(self._optimizer.state.get(parameter, {}).items())
            if isinstance(value, Tensor) and value.is_floating_point() and key != "step"
        ]

    def reset_state(self) -> None:
        """Let the optimizer begin anew."""
        self._optimizer.state.clear()

    @contextmanager
    def as_mean(self) -> Iterator[None]:
        """Let parameters and buffers be their means over all ranks inside. Collective."""
        with self.holding(self.means([*self.parameters(), *self.buffers()])):
            yield

    def average_buffers(self) -> None:
        """Give all ranks the means of their buffers. Collective."""
        means = self.means(self.buffers())
        for name, buffer in self.buffers():
            buffer.copy_(means[name])

    def means(self, named: NamedTensors) -> dict[str, Tensor]:
        """Return the means of tensors over all ranks, by name. Collective."""
        return {name: self._mean(tensor) for name, tensor in named}

    @contextmanager
    def holding(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Let parameters and buffers have other values inside, by name."""
        tensors = {n: t for n, t in (*self.parameters(), *self.buffers()) if n in values}
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        try:
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
            yield
        finally:
            for name, tensor in tensors.items():
                tensor.copy_(kept[name])

    def mean_state(self) -> dict[str, Any]:
        """Return the optimizer's ``state_dict`` with the means of its state. Collective."""
        means = {id(tensor): self._mean(tensor) for _, tensor in self.state()}
        state = self._optimizer.state_dict()
        state["state"] = {
            number: {key: means.get(id(value), value) for key, value in own.items()}
            for number, own in state["state"].items()
        }
        return state

    def _mean(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            mean = tensor.clone()
            self._comm.allreduce_(mean, scale=1.0 / self._comm.size).wait()
        return mean
