"""Optimizers of embedding rows, which update only the rows that have a gradient."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from hpctrain.core.checks import Amount, Decay, Finite0, checked, require
from hpctrain.core.errors import ConfigError
from hpctrain.core.target import hint


@dataclass
class Rule(ABC):
    """Base class of row optimizers, which update only rows that have a gradient."""

    lr: float
    """Learning rate; may be set between two steps."""
    name: ClassVar[str]
    keeps: ClassVar[Mapping[str, int]] = {}
    """Number of state elements per row, by name; 0 means as many as the row has elements."""

    def widths(self, dim: int) -> dict[str, int]:
        """Return the number of state elements per row, by name, for rows of ``dim`` elements."""
        return {each: width or dim for each, width in self.keeps.items()}

    @abstractmethod
    def step(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """Update ``rows``, ``(rows, dim)``, and ``state`` in place; ``step`` counts from 1."""


@dataclass
class RowSGD(Rule):
    """Gradient descent without momentum, like ``torch.optim.SGD``."""

    name = "sgd"

    def step(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """Subtract ``lr`` times the gradients."""
        del state, step
        rows.sub_(grads, alpha=self.lr)


@dataclass
class RowAdagrad(Rule):
    """Adagrad with one accumulator per row: the sum of the mean squared gradients.

    Source: Duchi, Hazan and Singer 2011; one accumulator per row as in Mudigere et al. 2022,
    arXiv:2104.05158.
    """

    eps: float = 1e-8
    name = "adagrad"
    keeps: ClassVar[Mapping[str, int]] = {"square": 1}

    def step(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """Update the accumulators; then subtract ``lr * grads / (sqrt(square) + eps)``."""
        del step
        total = state["square"].add_(grads.square().mean(dim=1, keepdim=True))
        rows.addcdiv_(grads, total.sqrt().add_(self.eps), value=-self.lr)


@dataclass
class RowAdam(Rule):
    """Adam that updates only the moments of rows with a gradient, like ``torch.optim.SparseAdam``.

    Source: Kingma and Ba 2015, arXiv:1412.6980.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    name = "adam"
    keeps: ClassVar[Mapping[str, int]] = {"first": 0, "second": 0}

    def step(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """Update the moments and the rows; bias correction uses the steps of the table."""
        beta1, beta2 = self.betas
        first = state["first"].lerp_(grads, 1 - beta1)
        second = state["second"].lerp_(grads.square(), 1 - beta2)
        rate = self.lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        rows.addcdiv_(first, second.sqrt().add_(self.eps), value=-rate)


_RULES = {kind.name: kind for kind in (RowSGD, RowAdagrad, RowAdam)}


def make_rule(name: str, lr: float, options: Mapping[str, object]) -> Rule:
    """Return the optimizer ``name``; raise ``ConfigError`` for an unknown name or option."""
    if name not in _RULES:
        raise ConfigError(f"optimizer must be one of {', '.join(_RULES)}, got {name!r}")
    kind = _RULES[name]
    valid = [field.name for field in fields(kind) if field.name != "lr"]
    if wrong := next((each for each in options if each not in valid), ""):
        raise ConfigError(
            f"options of the optimizer {name} must be {' and '.join(valid) or 'empty'}, got "
            f"{wrong}{hint(wrong, valid)}"
        )
    betas, eps = options.get("betas", (0.0, 0.0)), options.get("eps", 1e-8)
    pair = betas if isinstance(betas, tuple | list) and len(betas) == 2 else ()
    require(bool(pair), "betas must be two numbers", betas)
    for beta in pair:
        checked("betas", beta, Decay)
    checked("eps", eps, Amount)
    made: Rule = kind(learning_rate(lr), **options)  # type: ignore[arg-type]
    return made


def learning_rate(value: object) -> float:
    """Return ``value`` as a float; raise ``ConfigError`` if it is not a learning rate."""
    return float(checked("the lr of a table", value, Finite0))
