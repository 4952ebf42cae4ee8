"""``PieceStep``, which applies the step of an optimizer to parts of its parameters."""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import first_state_of_adagrad

_OF_TORCH = {
    "elementwise": (
        *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax"),
        *("ASGD", "Rprop"),
    ),
    "tensorwise": ("Adafactor", "Muon"),
}
"""Names of torch optimizers by property. Another optimizer class has a property if its attribute
with the name of the property is True."""
_NOT_OF_STEPS = {"param_groups", "state", "step", "_exchange"}
_NUM_PROBED = 3  # elements of a probe: more than one, so that elementwise state is not a scalar


class StateSpec(NamedTuple):
    """Dtype and shape of one tensor in the optimizer state of a parameter."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None  # None for the shape of the parameter


class PieceStep:
    """Applies the step of an optimizer to pieces of its parameters.

    The result is bitwise equal to a step on whole parameters.

    The ``step`` method of the optimizer's class is called on an object that has all attributes of
    the optimizer, but pieces in place of parameters. ``read`` copies the settings of parameter
    groups before every step.

    Args:
        optimizer: optimizer that updates every element, or every tensor, independently.

    Raises:
        ConfigError: the optimizer is not known to update elements or tensors independently; its
            parameters are not in host memory; or ``differentiable`` is set.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        kind = type(optimizer)
        found = next((how for how in _OF_TORCH if is_known_as(how, optimizer)), None)
        if found is None:
            raise ConfigError(
                f'the optimizer for shard="node" must change every element or every tensor '
                f"separately, but this is not known of {kind.__module__}.{kind.__qualname__}; use "
                f"{', '.join(chain(*_OF_TORCH.values()))} of torch.optim, set elementwise = True "
                f"or tensorwise = True in your class, or leave shard out"
            )
        self.takes_tensors = found == "tensorwise"
        """Whether each piece must be a whole parameter."""
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ConfigError(
                'differentiable must be False with shard="node", got differentiable=True; leave '
                "differentiable or shard out"
            )
        if away := {p.device.type for g in optimizer.param_groups for p in g["params"]} - {"cpu"}:
            raise ConfigError(
                f'parameters must be in host memory with shard="node", got some on '
                f"{', '.join(sorted(away))}; leave shard out, or divide the state by "
                f"hpctrain.parallel.shard(model, optimizer, stage=1)"
            )
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        """State of each piece after a step."""
        self._of = kind.__new__(kind)
        self._step = inspect.unwrap(kind.step)  # without hooks, which must run once per step
        # Before torch 2.13 the constructor of Adagrad creates the state, not the first step.
        self._has_early_state = isinstance(self._of, Adagrad) and bool(
            first_state_of_adagrad(torch.zeros(()), {})
        )
        self.kinds: list[tuple[object, ...]] = []
        """Settings of each group that determine which state exists, such as a nonzero momentum."""
        self._settings: list[dict[str, Any]] = []
        self._parts: dict[Any, dict[str, StateSpec]] = {}

    def read(self, optimizer: Optimizer) -> str:
        """Copy the settings of ``optimizer``; return them as text to compare between ranks."""
        own, its = vars(optimizer).items(), vars(self._of)
        its.clear()  # a GradScaler adds attributes and deletes them again
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
        """Update each piece from its ``.grad``.

        Args:
            pieces: maps the index of a parameter group to pieces of its parameters.
        """
        self._of.param_groups = [
            {**self._settings[group], "params": own} for group, own in pieces.items()
        ]
        self._of.state = self.state
        if self._has_early_state:
            for group in self._of.param_groups:
                for piece in group["params"]:
                    if piece not in self.state:
                        self.state[piece] |= first_state_of_adagrad(piece, group)
        self._step(self._of)

    def parts(
        self, group: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> dict[str, StateSpec]:
        """Return the dtype and shape of each state tensor of a parameter, by name of the tensor.

        A trial step on a tensor of ones determines dtypes and shapes.

        Raises:
            ConfigError: the state contains a value that is not a tensor; or, for an elementwise
                optimizer, a tensor whose number of elements is neither 1 nor the parameter's.
        """
        shape = shape if self.takes_tensors else (_NUM_PROBED,)
        key = dtype, self.kinds[group], shape
        if key not in self._parts:
            before = self.state
            found: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
            self.state = found
            probe = torch.ones(shape, dtype=dtype)
            probe.grad = torch.ones_like(probe)
            try:
                with torch.no_grad():
                    self.step({group: [probe]})
                self._parts[key] = dict(self._parts_of(found[probe]))
            finally:
                self.state = before
        return self._parts[key]

    def _parts_of(self, state: Mapping[str, Any]) -> Iterable[tuple[str, StateSpec]]:
        for name, value in state.items():
            if value is None:
                continue
            whole = self.takes_tensors
            if not isinstance(value, Tensor) or not (whole or value.numel() in (1, _NUM_PROBED)):
                form = "" if whole else " with the elements of the parameter, or with one element"
                raise ConfigError(
                    f'the optimizer state for shard="node" must consist of tensors{form}, got '
                    f"{name} = {value!r:.100} of {type(self._of).__name__}; leave shard out"
                )
            has_elements = not whole and value.numel() == _NUM_PROBED
            yield name, StateSpec(value.dtype, None if has_elements else tuple(value.shape))


def is_known_as(how: str, optimizer: Optimizer) -> bool:
    """Return whether an optimizer has the property ``how``, for example ``"elementwise"``.

    A subclass does not inherit the property, because its step may differ.
    """
    kind = type(optimizer)
    if any(kind is getattr(torch.optim, name, None) for name in _OF_TORCH[how]):
        return True
    return how in vars(kind) and bool(getattr(optimizer, how))


def can_shard(optimizer: Optimizer) -> bool:
    """Return whether ``shard="node"`` supports an optimizer."""
    try:
        PieceStep(optimizer)
    except ConfigError:
        return False
    return True


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value
