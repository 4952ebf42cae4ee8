"""Optimizers whose step treats every element alike: their own step, on pieces of parameters."""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.core.errors import ConfigError

_OF_TORCH = (
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax"),
    *("ASGD", "Rprop"),
)
_NOT_OF_STEPS = {"param_groups", "state", "step", "_exchange", "_reducer"}
_NUM_PROBED = 3  # elements: neither a scalar nor one element


class Part(NamedTuple):
    """One tensor of an optimizer's state of a parameter."""

    dtype: torch.dtype
    has_elements: bool  # one for each of the parameter; else it is a single number


class PieceStep:
    """Takes the step of an optimizer on pieces of its parameters, with the same bits.

    The step is that of the optimizer's class, on an object that has all its attributes, and
    pieces in the place of parameters. Settings of the groups are read anew in every step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Take the optimizer; ``ConfigError`` if its step is not known to go by elements."""
        kind = type(optimizer)
        is_of_torch = any(kind is getattr(torch.optim, name) for name in _OF_TORCH)
        if not is_of_torch and not vars(kind).get("elementwise", False):
            raise ConfigError(
                f'shard="node" needs an optimizer that treats every element by itself, and '
                f"whether {kind.__module__}.{kind.__qualname__} does is not known; known are "
                f"{', '.join(_OF_TORCH)} of torch.optim; a class of your own says so by "
                f"elementwise = True; leave shard out for others"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ConfigError(
                'shard="node" takes no step that is differentiated, got differentiable=True; '
                "leave one of them out"
            )
        if away := {p.device.type for g in optimizer.param_groups for p in g["params"]} - {"cpu"}:
            raise ConfigError(
                f'shard="node" needs parameters in the memory of the node, got some on '
                f"{', '.join(sorted(away))}; leave shard out"
            )
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        """By piece, as the step leaves it."""
        self._of = kind.__new__(kind)
        self._step = inspect.unwrap(kind.step)  # hooks are those of the whole step
        self.kinds: list[tuple[object, ...]] = []
        """Of each group what decides which state a step leaves, such as a momentum or none."""
        self._settings: list[dict[str, Any]] = []
        self._parts: dict[Any, dict[str, Part]] = {}

    def read(self, optimizer: Optimizer) -> str:
        """Take over the settings of today; return them as a text that ranks can compare."""
        own, its = vars(optimizer).items(), vars(self._of)
        its.clear()  # a scaler puts something there and takes it away again
        its.update({k: v for k, v in own if k not in _NOT_OF_STEPS})
        self._settings = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        self.kinds = [
            tuple(bool(v) if isinstance(v, bool | int | float) else str(v) for v in one.values())
            for one in self._settings
        ]
        return "; ".join(str([*map(_plain, one.values())]) for one in self._settings)

    def step(self, pieces: Mapping[int, list[Tensor]]) -> None:
        """Step on pieces of each group, whose ``.grad`` is set."""
        self._of.param_groups = [
            {**self._settings[group], "params": own} for group, own in pieces.items()
        ]
        self._of.state = self.state
        self._step(self._of)

    def parts(self, group: int, dtype: torch.dtype) -> dict[str, Part]:
        """Return what a step leaves as state of a parameter, found out on a few zeros.

        ``ConfigError``: it holds something else than tensors with the parameter's elements, and
        single numbers.
        """
        key = dtype, self.kinds[group]
        if key not in self._parts:
            before = self.state
            found: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
            self.state = found
            probe = torch.zeros(_NUM_PROBED, dtype=dtype)
            probe.grad = torch.zeros_like(probe)
            try:
                with torch.no_grad():
                    self.step({group: [probe]})
                self._parts[key] = dict(self._parts_of(found[probe], _NUM_PROBED))
            finally:
                self.state = before
        return self._parts[key]

    def _parts_of(self, state: Mapping[str, Any], numel: int) -> Iterable[tuple[str, Part]]:
        for name, value in state.items():
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.numel() not in (1, numel):
                raise ConfigError(
                    f'shard="node" needs an optimizer state of tensors with the elements of their '
                    f"parameter, and of tensors with one number, got {name} = {value!r} of "
                    f"{type(self._of).__name__}; leave shard out"
                )
            yield name, Part(value.dtype, value.numel() == numel)


def can_shard(optimizer: Optimizer) -> bool:
    """Say whether ``shard="node"`` takes an optimizer."""
    try:
        PieceStep(optimizer)
    except ConfigError:
        return False
    return True


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value
