"""Groups of parameters whose gradients travel together because somebody asked for it."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from hpctrain.core.errors import ConfigError

Groups = int | Sequence[Sequence[Tensor]]
"""How many groups of about as many parameters each, or the groups; 0 for none."""


class Grouping:
    """Groups of parameters; each travels as one message for each dtype in it."""

    def __init__(self, groups: Groups | None) -> None:
        """Check the groups.

        Args:
            groups: None for none. Parameters of lists need not be trained, and those in no list
                travel in ordinary buckets.

        Raises:
            ConfigError: it is no such thing, or a parameter is in it twice.
        """
        self._num_groups = 0
        self._group_of: dict[Tensor, int] = {}
        if groups is None:
            return
        if isinstance(groups, int):
            if groups < 0:
                raise ConfigError(f"groups is a non-negative number or lists, got {groups}")
            self._num_groups = groups
        else:
            self._group_of = _numbered(groups)

    def numbers(self, parameters: Sequence[Parameter]) -> list[int | None]:
        """Return the number of the group of each parameter; empty where there are no groups.

        Args:
            parameters: all that get gradients. Where only a number of groups was given, these
                are cut into so many parts, in this order.
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
                    f"groups consist of parameters, got {type(parameter).__name__} in group "
                    f"{number}; give lists of the tensors themselves"
                )
            if parameter in group_of:
                raise ConfigError(
                    f"a parameter is in one group, got one of shape {tuple(parameter.shape)} in "
                    f"groups {group_of[parameter]} and {number}; take it out of one"
                )
            group_of[parameter] = number
    return group_of


def _iterated(groups: object) -> list[Any]:
    if isinstance(groups, Tensor | str) or not isinstance(groups, Iterable):
        raise ConfigError(
            f"groups is a non-negative number or a list of lists of parameters, got "
            f"{type(groups).__name__}"
        )
    return list(groups)
