"""Base class of LARS and LAMB."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hpctrain.core.checks import AtLeast0, checked
from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import foreach_mul_

Tensors = list[Tensor]

_LARGEST = 2.0**100
"""Largest factor of one multiplication; float32 values are below 2**128."""


class AdaptiveOptimizer(Optimizer):
    """Base class of optimizers that scale the step of each tensor by a ratio of norms.

    Complex parameters are updated as pairs of real numbers, as in ``torch.optim.Adam``; norms of
    16-bit tensors are computed in float32. Sparse gradients raise ``ConfigError``.
    """

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see ``torch.optim.Optimizer.add_param_group``.

        Raises:
            ConfigError: an argument is not valid.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "weight_decay"):
            checked(name, float(group[name]), AtLeast0)
        self.check(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: function that computes gradients before the step, and returns the loss.

        Returns:
            The loss of the closure, or None.

        Raises:
            ConfigError: a gradient is sparse; parameters are unchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_sparse()
        for group in self.param_groups:
            for tensors in self._tensors_of(group):
                self.update(group, *tensors)
        return loss

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` unless the arguments of a parameter group are valid."""

    @abstractmethod
    def state_names(self, group: Mapping[str, Any]) -> Sequence[str]:
        """Return the names of the entries of a parameter's state.

        ``step`` is a scalar tensor; every other entry is a tensor of the parameter's shape.
        """

    @abstractmethod
    def update(
        self, group: Mapping[str, Any], params: Tensors, grads: Tensors, *state: Tensors
    ) -> None:
        """Update parameters of one device and dtype, and their state, in place."""

    def _refuse_sparse(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                    raise ConfigError(
                        f"{type(self).__name__} must get dense gradients, got a sparse gradient "
                        f"of shape {tuple(parameter.shape)}; make the layer with sparse=False, or "
                        f"pass its parameters to torch.optim.SparseAdam"
                    )

    def _tensors_of(self, group: Mapping[str, Any]) -> list[list[Tensors]]:
        """Return, for each device and dtype, the lists of parameters, gradients and state."""
        rows, names = defaultdict(list), self.state_names(group)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            for name in names:
                if name not in state:
                    is_number = name == "step"
                    state[name] = torch.zeros(()) if is_number else torch.zeros_like(parameter)
            row = [parameter, parameter.grad, *(state[name] for name in names)]
            rows[parameter.device, parameter.dtype].append([*map(_real, row)])
        return [[*map(list, zip(*found, strict=True))] for found in rows.values()]


def ratios(weights: Tensor, other: Tensor, below: Tensor) -> Tensor:
    """Return ``weights / below`` elementwise, but 1 where ``weights`` or ``other`` is 0."""
    return torch.where((weights > 0) & (other > 0), weights / below, 1.0)


def multiply_(tensors: Tensors, factors: Tensor) -> None:
    """Multiply each tensor in place by its float64 factor.

    A factor may exceed the range of the tensor's dtype.
    """
    first = factors.clamp(1.0 / _LARGEST, _LARGEST)
    foreach_mul_(tensors, first.tolist())
    if not torch.equal(first, factors):
        foreach_mul_(tensors, (factors / first).tolist())


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
