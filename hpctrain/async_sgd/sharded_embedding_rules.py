"""Rules by which the owner of a row steps it: on the row alone, when it was touched."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, TypeGuard

from torch import Tensor

from hpctrain.core.errors import ConfigError
from hpctrain.core.target import hint


@dataclass
class Rule(ABC):
    """How touched rows are stepped."""

    lr: float
    """The learning rate; it may be set between two steps."""
    name: ClassVar[str]
    keeps: ClassVar[Mapping[str, int]] = {}
    """How many numbers are kept of each row, by name; 0 for as many as it has."""

    def widths(self, dim: int) -> dict[str, int]:
        """Return how many they are for rows of ``dim`` numbers."""
        return {each: width or dim for each, width in self.keeps.items()}

    @abstractmethod
    def step(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """Step ``(touched, dim)`` rows, and what they keep, in place; ``step`` counts from 1."""


@dataclass
class RowSGD(Rule):
    """Plain gradient descent: as ``torch.optim.SGD`` on the rows that were touched."""

    name = "sgd"

    def step(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """Descend."""
        del state, step
        rows.sub_(grads, alpha=self.lr)


@dataclass
class RowAdagrad(Rule):
    """Adagrad with one number for each row: the sum of the mean squares of its gradients.

    Source: Duchi, Hazan and Singer 2011; a number per row as Mudigere et al. 2022,
    arXiv:2104.05158.
    """

    eps: float = 1e-8
    name = "adagrad"
    keeps: ClassVar[Mapping[str, int]] = {"square": 1}

    def step(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """Add to the sum, and divide by its root."""
        del step
        total = state["square"].add_(grads.square().mean(dim=1, keepdim=True))
        rows.addcdiv_(grads, total.sqrt().add_(self.eps), value=-self.lr)


@dataclass
class RowAdam(Rule):
    """Adam whose moments stand still while a row is not touched: as ``torch.optim.SparseAdam``.

    Source: Kingma and Ba 2015, arXiv:1412.6980.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    name = "adam"
    keeps: ClassVar[Mapping[str, int]] = {"first": 0, "second": 0}

    def step(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """Step by the moments, corrected by the number of steps of the table."""
        beta1, beta2 = self.betas
        first = state["first"].lerp_(grads, 1 - beta1)
        second = state["second"].lerp_(grads.square(), 1 - beta2)
        rate = self.lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        rows.addcdiv_(first, second.sqrt().add_(self.eps), value=-rate)


_RULES = {kind.name: kind for kind in (RowSGD, RowAdagrad, RowAdam)}


def make_rule(name: str, lr: float, options: Mapping[str, object]) -> Rule:
    """Return a rule. Raises ``ConfigError``: there is none, or it does not take the options."""
    if name not in _RULES:
        raise ConfigError(f"optimizer is one of {', '.join(_RULES)}, got {name!r}")
    kind = _RULES[name]
    valid = [field.name for field in fields(kind) if field.name != "lr"]
    if wrong := next((each for each in options if each not in valid), ""):
        raise ConfigError(f"optimizer {name} takes no {wrong}{hint(wrong, valid)}")
    betas, eps = options.get("betas", (0.0, 0.0)), options.get("eps", 1e-8)
    pair = betas if isinstance(betas, tuple | list) and len(betas) == 2 else (-1,)
    are_valid = all(_is_number(beta) and 0 <= beta < 1 for beta in pair)
    if not (are_valid and _is_number(eps) and eps > 0):
        raise ConfigError(
            f"eps is above 0 and betas are two numbers from 0 to below 1, got {dict(options)}"
        )
    made: Rule = kind(learning_rate(lr), **options)  # type: ignore[arg-type]
    return made


def learning_rate(value: object) -> float:
    """Return it as a number. Raises ``ConfigError``: it is none."""
    if not _is_number(value) or value < 0:
        raise ConfigError(
            f"the lr of a table is a number of at least 0, got {value!r}; set table.lr = 0.01, "
            f"on all ranks alike"
        )
    return float(value)


def _is_number(value: object) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]
