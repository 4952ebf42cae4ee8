"""Names of an optimizer's parameters, the same on every rank."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpctrain.core.errors import ConfigError

NamedParameters = Sequence[tuple[str, Parameter]]


def names_of(optimizer: Optimizer, named_parameters: Iterable[Any] | None) -> dict[Tensor, str]:
    """Return the name of every parameter; by its place in the optimizer if none are given.

    ``ConfigError`` if these are no pairs, a name comes twice, or a parameter has none.
    """
    if named_parameters is None:
        return {parameter: place for place, parameter in places_of(optimizer)}
    named = list(named_parameters)
    if strangers := [entry for entry in named if not isinstance(entry, tuple) or len(entry) != 2]:
        raise ConfigError(
            f"named_parameters is a sequence of tuples (name, parameter), got "
            f"{type(strangers[0]).__name__}; give model.named_parameters()"
        )
    times = Counter(name for name, _ in named)
    if repeated := sorted(name for name, count in times.items() if count > 1):
        raise ConfigError(f"names of parameters must differ, got twice: {', '.join(repeated)}")
    names = {parameter: name for name, parameter in named}
    if missing := [
        f"{place} {tuple(p.shape)}" for place, p in places_of(optimizer) if p not in names
    ]:
        raise ConfigError(
            f"named_parameters names all parameters of the optimizer or is None, it lacks "
            f"{len(missing)}: {', '.join(missing[:3])}"
        )
    return names


def trained(optimizer: Optimizer | None, names: Mapping[Tensor, str]) -> NamedParameters:
    """Return the parameters that get gradients today; names are of those there at the wrap."""
    return [(name, p) for name, p in named(optimizer, names) if p.requires_grad]


def named(optimizer: Optimizer | None, names: Mapping[Tensor, str]) -> NamedParameters:
    """Return all parameters of today with their names; see ``trained``."""
    places = places_of(optimizer) if optimizer is not None else []
    return [(names.get(p) or place, p) for place, p in places]


def places_of(optimizer: Optimizer) -> NamedParameters:
    """Return the parameters of an optimizer, named by their places in it."""
    return [
        (f"group {g}, parameter {i}", parameter)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]
