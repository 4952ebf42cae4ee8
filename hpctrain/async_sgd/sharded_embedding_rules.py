"""Rules by which the owner of a row steps it: on the row alone, when it was touched."""

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.core.errors import ConfigError
from hpctrain.core.target import hint

Places: TypeAlias = NDArray[np.int64]
"""Numbers of rows, ``(rows,)``."""


def take(rows: Tensor, places: Places) -> Tensor:
    """Return a copy of some rows, ``(places, width)``."""
    if rows.dtype is torch.float32 and len(places):  # its kernel reads ahead, twice as fast
        return bag_sums(rows, places, np.arange(len(places)))
    return rows.index_select(0, torch.from_numpy(places))


class Buffers:
    """Memory for results, used again when nobody refers to them any more.

    Fresh memory costs several times the copy into it, page by page.
    """

    _MOST = 4  # results of one table that are in use at once and have memory that is kept

    def __init__(self) -> None:
        self._kept: list[tuple[NDArray[np.uint8], weakref.ref[NDArray[np.uint8]]]] = []

    def take(self, rows: Tensor, places: Places) -> Tensor:
        """Do as ``take``."""
        if not len(places):
            return take(rows, places)
        num_bytes = len(places) * rows.shape[1] * rows.itemsize
        free = (i for i, (memory, user) in enumerate(self._kept) if user() is None)
        fits = (i for i in free if len(self._kept[i][0]) >= num_bytes)
        number = next(fits, None)
        memory = np.empty(num_bytes, np.uint8) if number is None else self._kept.pop(number)[0]
        view = memory[:num_bytes]  # torch refers to it as long as a tensor has this memory
        self._kept = [(memory, weakref.ref(view)), *self._kept[: self._MOST - 1]]
        found = torch.from_numpy(view).view(rows.dtype).view(len(places), rows.shape[1])
        np.take(rows.numpy(), places, axis=0, out=found.numpy(), mode="clip")
        return found


def bag_sums(rows: Tensor, places: Places, starts: Places) -> Tensor:
    """Return the sums of rows of some places, in their order, from each of ``starts`` on."""
    at, begin = torch.from_numpy(places), torch.from_numpy(starts)
    sums: Tensor = torch.embedding_bag(rows, at, begin, scale_grad_by_freq=False, mode=0)[0]
    return sums


def put(rows: Tensor, places: Places, values: Tensor) -> None:
    """Replace some rows of a contiguous ``(rows, width)``."""
    kind = np.dtype((np.void, rows.shape[1] * rows.itemsize))  # copied row by row, not by number
    there, given = (each.contiguous().numpy().view(kind)[:, 0] for each in (rows, values))
    np.put(there, places, given)


class Rule(Protocol):
    """How touched rows are stepped."""

    lr: float
    """The learning rate; it may be set between two steps."""

    def widths(self, dim: int) -> dict[str, int]:
        """Return the numbers that each row keeps, by name."""

    def step(
        self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], places: Places, step: int
    ) -> None:
        """Step ``(touched, dim)`` rows in place; ``places`` are theirs in ``state``.

        ``step`` counts from 1.
        """


@dataclass
class RowSGD:
    """Plain gradient descent: as ``torch.optim.SGD`` on the rows that were touched."""

    lr: float
    name: ClassVar[str] = "sgd"

    def widths(self, dim: int) -> dict[str, int]:
        """Keep nothing."""
        del dim
        return {}

    def step(
        self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], places: Places, step: int
    ) -> None:
        """Descend."""
        del state, places, step
        rows.sub_(grads, alpha=self.lr)


@dataclass
class RowAdagrad:
    """Adagrad with one number for each row: the sum of the mean squares of its gradients.

    Source: Duchi, Hazan and Singer 2011; a number per row as Mudigere et al. 2022,
    arXiv:2104.05158.
    """

    lr: float
    eps: float = 1e-8
    name: ClassVar[str] = "adagrad"

    def widths(self, dim: int) -> dict[str, int]:
        """Keep the sum."""
        del dim
        return {"square": 1}

    def step(
        self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], places: Places, step: int
    ) -> None:
        """Add to the sum, and divide by its root."""
        del step
        total = take(state["square"], places).add_(grads.square().mean(dim=1, keepdim=True))
        put(state["square"], places, total)
        rows.addcdiv_(grads, total.sqrt_().add_(self.eps), value=-self.lr)


@dataclass
class RowAdam:
    """Adam whose moments stand still while a row is not touched: as ``torch.optim.SparseAdam``.

    Source: Kingma and Ba 2015, arXiv:1412.6980.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    name: ClassVar[str] = "adam"

    def widths(self, dim: int) -> dict[str, int]:
        """Keep both moments of each number."""
        return {"first": dim, "second": dim}

    def step(
        self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], places: Places, step: int
    ) -> None:
        """Step by the moments, corrected by the number of steps of the table."""
        beta1, beta2 = self.betas
        first = take(state["first"], places).lerp_(grads, 1 - beta1)
        second = take(state["second"], places).lerp_(grads.square(), 1 - beta2)
        put(state["first"], places, first)
        put(state["second"], places, second)
        rate = self.lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        rows.addcdiv_(first, second.sqrt_().add_(self.eps), value=-rate)


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
    is_pair = isinstance(betas, tuple | list) and len(betas) == 2
    betas = tuple(betas) if isinstance(betas, tuple | list) else (-1,)
    are_valid = is_pair and all(_is_number(beta) and 0 <= beta < 1 for beta in betas)
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
