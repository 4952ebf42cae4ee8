"""Names and groups of an optimizer's parameters, the same on every rank."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpctrain.core.errors import ConfigError

NamedParameters = Sequence[tuple[str, Parameter]]


def names_of(optimizer: Optimizer, named_parameters: Iterable[Any] | None) -> dict[Tensor, str]:
    """Return the name of every parameter; by default the name is the position in the optimizer.

    Raises:
        ConfigError: an entry is not a pair, a name occurs twice, or a parameter has no name.
    """
    if named_parameters is None:
        return {parameter: place for place, parameter in places_of(optimizer)}
    named = list(named_parameters)
    if malformed := [entry for entry in named if not isinstance(entry, tuple) or len(entry) != 2]:
        raise ConfigError(
            f"named_parameters must contain tuples (name, parameter), got "
            f"{type(malformed[0]).__name__}; pass model.named_parameters()"
        )
    times = Counter(name for name, _ in named)
    if repeated := sorted(name for name, count in times.items() if count > 1):
        raise ConfigError(
            f"names of parameters must differ, got twice: {', '.join(repeated)}; pass "
            f"model.named_parameters()"
        )
    names = {parameter: name for name, parameter in named}
    if missing := [
        f"{place} {tuple(p.shape)}" for place, p in places_of(optimizer) if p not in names
    ]:
        raise ConfigError(
            f"named_parameters must contain all parameters of the optimizer, but lacks "
            f"{len(missing)}: {', '.join(missing[:3])}; pass model.named_parameters() or None"
        )
    return names


def named(owner: Callable[[], Optimizer | None], names: Mapping[Tensor, str]) -> NamedParameters:
    """Return the current parameters of an optimizer with their names.

    Parameters that are not in ``names``, because they were added later, are named by position.
    """
    optimizer = owner()
    places = places_of(optimizer) if optimizer is not None else []
    return [(names.get(p) or place, p) for place, p in places]


def places_of(optimizer: Optimizer) -> NamedParameters:
    """Return the parameters of an optimizer, named by position."""
    return [
        (f"group {g}, parameter {i}", parameter)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]


Groups = int | Sequence[Sequence[Tensor]]
"""Lists of parameters, or a number of groups of about equal length; 0 for no groups."""


class Grouping:
    """Groups of parameters whose gradients are sent as one message per dtype.

    Args:
        groups: number of groups, or one list of parameters per group; frozen parameters are
            allowed. Gradients of parameters in no list are sent in ordinary buckets.
        sparse_as_dense: whether sparse gradients are sent as dense gradients; ``.grad`` is sparse
            in both cases.

    Raises:
        ConfigError: ``groups`` is neither a number nor lists, or contains a parameter twice.
    """

    def __init__(self, groups: Groups | None = None, *, sparse_as_dense: bool = False) -> None:
        self.sparse_as_dense = sparse_as_dense
        self._num_groups = 0
        self._group_of: dict[Tensor, int] = {}
        if groups is None:
            return
        if isinstance(groups, int):
            if groups < 0:
                raise ConfigError(
                    f"groups must be a non-negative number or lists of parameters, got {groups}; "
                    f"use 0 for no groups"
                )
            self._num_groups = groups
        else:
            self._group_of = _numbered(groups)

    def numbers(self, parameters: Sequence[Parameter]) -> list[int | None]:
        """Return the group index of each parameter, from 0; None for a parameter in no group.

        The list is empty if no groups were requested. If only the number of groups was given, the
        parameters are divided into ranges of about equal length.
        """
        if self._group_of:
            return [self._group_of.get(parameter) for parameter in parameters]
        if not self._num_groups:
            return []
        return [i * self._num_groups // len(parameters) for i in range(len(parameters))]


def _numbered(groups: object) -> dict[Tensor, int]:
    group_of: dict[Tensor, int] = {}
    for number, group in enumerate(_iterated(groups)):
        for parameter in _iterated(group):
            if not isinstance(parameter, Tensor):
                raise ConfigError(
                    f"groups must contain parameters, got {type(parameter).__name__} in group "
                    f"{number}; pass lists of parameters"
                )
            if parameter in group_of:
                raise ConfigError(
                    "a parameter must be in one group, got a parameter of shape "
                    f"{tuple(parameter.shape)} in groups {group_of[parameter]} and {number}; "
                    "remove it from one of the groups"
                )
            group_of[parameter] = number
    return group_of


def _iterated(groups: object) -> list[Any]:
    if isinstance(groups, Tensor | str) or not isinstance(groups, Iterable):
        raise ConfigError(
            f"groups must be a non-negative number or a list of lists of parameters, got "
            f"{type(groups).__name__}; pass groups=None for no groups"
        )
    return list(groups)
