"""Federated rounds: which ranks are drawn for one, and what their local steps are taken by."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.comm.agreement import raise_if_any, require_equal
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError
from hpctrain.local_sgd.rounds import Draw, Fields, StateFields


@dataclass(frozen=True, kw_only=True, slots=True)
class Federated:
    """What a local method is told of its rounds."""

    fraction: float = 1.0
    seed: int = 0
    proximal: float = 0.0
    state: str = "local"
    refusal: str | None = None  # why the method cannot do so, if it cannot

    def draw(self, comm: Communicator, method: str) -> Draw:
        """Return who is drawn by a ``method``; all ranks have given the same. Collective.

        Raises ``ConfigError``: an argument is not valid, or ``MismatchError``: ranks have given
        others; on every rank.
        """
        refusal = self._refusal()
        raise_if_any(comm.allgather_object(refusal), ConfigError)
        fraction, seed, proximal = float(self.fraction), int(self.seed), float(self.proximal)
        lines = [f"{method} state={self.state} {fraction=} {seed=} {proximal=}"]
        what = "method, state, fraction, seed and proximal"
        require_equal(comm, lines, what, "give all ranks the same")
        return Draw(comm.rank, comm.size, fraction, seed)

    def _refusal(self) -> str | None:
        if not (_is_number(self.fraction) and 0 < self.fraction <= 1):
            return f"fraction is a part of the ranks, above 0 and at most 1, got {self.fraction!r}"
        if not (_is_number(self.proximal) and self.proximal >= 0 and isfinite(self.proximal)):
            return f"proximal is a finite number of at least 0, got {self.proximal!r}"
        if not (_is_number(self.seed, Integral) and 0 <= self.seed < 1 << 63):
            return f"seed is a whole number in [0, 2^63), got {self.seed!r}"
        return self.refusal if self.fraction < 1 or self.proximal else None


def _is_number(value: object, kind: Any = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


class LocalGradients(StateFields):
    """What stands in the place of gradients while the optimizer takes a local step.

    With a proximal term it is the gradient of loss + mu/2 ||w - w_round||^2 (Li et al. 2020,
    arXiv:1812.06127), for parameters that have a gradient; in a step that does not count it is
    nothing, so that the optimizer leaves parameters and state as they are. ``.grad`` is as before
    after the step.
    """

    _OWN: ClassVar[Fields] = {"start": "_start", "number": "_number"}

    def __init__(self, model: nn.Module, optimizer: Optimizer, proximal: float) -> None:
        self._model, self._optimizer, self._proximal = model, optimizer, float(proximal)
        self._kept: list[tuple[Tensor, Tensor]] = []
        self.begin_round()

    def begin_round(self) -> None:
        """Let the next step be the first one of a round."""
        self._start: dict[str, Tensor] = {}  # parameters as the round has begun with them
        self._number = -1  # of that round

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; where it has none, the round's model is that of the next step."""
        self.begin_round()
        if state:
            super().load_own_state(state)

    def see(self, number: int) -> None:
        """Keep the model of the round ``number``, in front of its first step."""
        if not self._proximal:
            return
        if number != self._number:
            self._start, self._number = {}, number
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name not in self._start:
                self._start[name] = parameter.detach().clone()

    @torch.no_grad()
    def replace(self, *, counts: bool) -> None:
        """Put what the step is taken by in the place of gradients; none if it does not count."""
        self._kept = []
        if counts and not self._proximal:
            return
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                start = self._start.get(names.get(parameter, "")) if counts else None
                self._kept.append((parameter, parameter.grad))
                if not counts:
                    parameter.grad = None
                elif start is not None:
                    parameter.grad = self._pulled(parameter, start, group.get("maximize", False))

    def put_back(self) -> None:
        """Let parameters have the gradients again that they had before the step."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept = []

    def _pulled(self, parameter: Tensor, start: Tensor, maximize: bool) -> Tensor:  # noqa: FBT001
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise ConfigError(
                f"proximal pulls all elements of a parameter, one of shape "
                f"{tuple(parameter.shape)} has a sparse gradient; make the layer with sparse=False"
            )
        pull = (parameter - start.to(parameter.device)).mul_(-1 if maximize else 1)
        if (scale := getattr(self._optimizer, "grad_scale", None)) is not None:
            pull.mul_(scale)  # a fused optimizer below GradScaler divides by it
        return parameter.grad.add(pull, alpha=self._proximal)
