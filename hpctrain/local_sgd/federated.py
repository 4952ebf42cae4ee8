"""Federated rounds: random selection of the ranks of a round, and proximal gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.comm.agreement import raise_if_refused, require_equal
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError
from hpctrain.local_sgd.state_fields import Fields, StateFields


class Draw(StateFields):
    """Random selection of the ranks whose replicas count in a round; identical on all ranks.

    Args:
        rank: this rank.
        size: number of ranks.
        fraction: fraction of the ranks to draw, above 0 and at most 1; the number of ranks is
            rounded, and at least 1.
        seed: seed of all draws.
    """

    _SHARED: ClassVar[Fields] = {"seed": "_seed"}

    def __init__(self, rank: int, size: int, fraction: float = 1.0, seed: int = 0) -> None:
        self._rank, self._size, self._seed = rank, size, seed
        self.is_partial = fraction < 1
        self.num_ranks = max(1, int(fraction * size + 0.5))
        self._drawn: tuple[int, int, list[int]] | None = None

    def ranks(self, number: int) -> list[int]:
        """Return the sorted ranks of round ``number``: the ranks with the smallest hashes."""
        if self._drawn is None or self._drawn[:2] != (self._seed, number):
            hashes = {rank: self._hash(number, rank) for rank in range(self._size)}
            drawn = sorted(sorted(hashes, key=hashes.__getitem__)[: self.num_ranks])
            self._drawn = self._seed, number, drawn
        return self._drawn[2]

    def includes(self, number: int) -> bool:
        """Return whether this rank is drawn for round ``number``."""
        return self.num_ranks == self._size or self._rank in self.ranks(number)

    def _hash(self, number: int, rank: int) -> bytes:
        return sha256(f"{self._seed} {number} {rank}".encode()).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Federated:
    """Options of a local method: fraction of ranks per round, seed, proximal term."""

    fraction: float = 1.0
    seed: int = 0
    proximal: float = 0.0
    state: str = "local"
    refusal: str | None = None  # error text if the method does not support the options

    def draw(self, comm: Communicator, method: str) -> Draw:
        """Return the ``Draw`` of ``method``, after comparing options between ranks. Collective.

        Raises:
            ConfigError: an option is not valid; on every rank.
            MismatchError: ranks have different options; on every rank.
        """
        refusal = self._refusal()
        raise_if_refused(comm, refusal, ConfigError)
        fraction, seed, proximal = float(self.fraction), int(self.seed), float(self.proximal)
        lines = [f"{method} state={self.state} {fraction=} {seed=} {proximal=}"]
        what = "method, state, fraction, seed and proximal"
        require_equal(comm, lines, what, "give all ranks the same values")
        return Draw(comm.rank, comm.size, fraction, seed)

    def _refusal(self) -> str | None:
        if not (_is_number(self.fraction) and 0 < self.fraction <= 1):
            return (
                f"fraction must be above 0 and at most 1, got {self.fraction!r}; use 1 for all "
                f"ranks"
            )
        if not (_is_number(self.proximal) and self.proximal >= 0 and isfinite(self.proximal)):
            return (
                f"proximal must be finite and at least 0, got {self.proximal!r}; use 0 for no term"
            )
        if not (_is_number(self.seed, Integral) and 0 <= self.seed < 1 << 63):
            return f"seed must be an integer in [0, 2^63), got {self.seed!r}"
        return self.refusal if self.fraction < 1 or self.proximal else None


def _is_number(value: object, kind: Any = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


class LocalGradients(StateFields):
    """Replaces gradients while the optimizer takes a local step.

    With a proximal term, gradients are replaced by the gradients of loss + mu/2 ||w - w_round||^2
    (Li et al. 2020, arXiv:1812.06127), where w_round is the model at the start of the round. In a
    step that does not count, ``.grad`` is None, so that the optimizer changes neither parameters
    nor state. ``.grad`` is restored after the step.

    Args:
        model: module with the parameters.
        optimizer: optimizer of the parameters.
        proximal: mu; 0 for no proximal term.
    """

    _OWN: ClassVar[Fields] = {"start": "_start", "number": "_number"}

    def __init__(self, model: nn.Module, optimizer: Optimizer, proximal: float) -> None:
        self._model, self._optimizer, self._proximal = model, optimizer, float(proximal)
        self._kept: list[tuple[Tensor, Tensor]] = []
        self.begin_round()

    @property
    def are_proximal(self) -> bool:
        """Whether gradients include a proximal term."""
        return self._proximal > 0

    def begin_round(self) -> None:
        """Drop the copy of the model; the next step begins a round."""
        self._start: dict[str, Tensor] = {}  # parameters at the start of the round
        self._number = -1  # index of that round; -1 without a copy

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore the model of the round; if ``state`` is empty, the next step begins a round."""
        self.begin_round()
        if state:
            super().load_own_state(state)

    def copy_model(self, number: int) -> None:
        """Copy the model before the first step of round ``number``; no-op in later steps."""
        if not self._proximal:
            return
        if number != self._number:
            self._start, self._number = {}, number
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name not in self._start:
                self._start[name] = parameter.detach().clone()

    @torch.no_grad()
    def replace(self, *, counts: bool) -> None:
        """Replace the gradients by proximal gradients, or by None if the step does not count."""
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
                    parameter.grad = self._pulled(
                        parameter, start, maximize=group.get("maximize", False)
                    )

    def restore(self) -> None:
        """Restore the gradients after a step."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept = []

    def _pulled(self, parameter: Tensor, start: Tensor, *, maximize: bool) -> Tensor:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise ConfigError(
                f"gradients must be dense with proximal, but a parameter of shape "
                f"{tuple(parameter.shape)} has a sparse gradient; make the layer with sparse=False"
            )
        pull = (parameter - start.to(parameter.device)).mul_(-1 if maximize else 1)
        if (scale := getattr(self._optimizer, "grad_scale", None)) is not None:
            pull.mul_(scale)  # a fused optimizer divides gradients by the scale
        return parameter.grad.add(pull, alpha=self._proximal)
