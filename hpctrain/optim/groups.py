"""Parameter groups with separate arguments, selected by name, or for norms and biases."""

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hpctrain.core.errors import ConfigError

EXEMPTIONS: Mapping[str, Any] = {"weight_decay": 0.0, "adapt": False}
"""Arguments of norms and biases, for optimizers that have these arguments."""

_MOST_NAMES = 3


def exclusions(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Return two parameter groups: norms and biases (with ``options``), and all others.

    Norms are the parameters of normalization layers. All parameters with at most one dimension
    count as norms and biases. For an optimizer without the argument ``adapt``, call
    ``exclusions(model, weight_decay=0)``.

    Args:
        model: module whose parameters are grouped.
        options: arguments of norms and biases; by default ``weight_decay=0`` and ``adapt=False``,
            as in the publications of LARS and LAMB.
    """
    return parameter_groups(model, exempt=options or EXEMPTIONS)


def parameter_groups(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]] = (),
    exempt: Mapping[str, Any] | None = None,
    key: str = "groups",
) -> list[dict[str, Any]]:
    """Return parameter groups; parameters with equal arguments are in one group.

    Args:
        model: module whose parameters are grouped; their order is kept.
        groups: tables with ``match``, a pattern or a list of patterns of names, and arguments of
            the optimizer; the first table that matches a name applies.
        exempt: additional arguments of norms and biases.
        key: name of ``groups`` in error messages.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    parameters = dict(model.named_parameters())
    own: dict[str, dict[str, Any]] = {}
    for group in groups:
        match = group["match"]
        options = {name: value for name, value in group.items() if name != "match"}
        patterns = match if isinstance(match, list) else [match]
        for name in matched(patterns, [*parameters], key):
            own.setdefault(name, options)
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        options = own.get(name, {})
        if exempt and parameter.dim() <= 1:
            options = {**exempt, **options}
        group = found.setdefault(repr(sorted(options.items())), {"params": [], **options})
        group["params"].append(parameter)
    return [*found.values()]


def matched(patterns: Sequence[str], names: Sequence[str], key: str) -> list[str]:
    """Return the names that match any of the patterns, in the order of ``names``.

    Args:
        patterns: shell patterns, whose ``*`` also matches dots.
        names: names to match.
        key: configuration key for error messages.

    Raises:
        ConfigError: a pattern matches no name; the message lists similar names.
    """
    found: set[str] = set()
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            near = difflib.get_close_matches(pattern.strip("*."), names, n=_MOST_NAMES, cutoff=0.3)
            some = [*near, *(name for name in names if name not in near)][:_MOST_NAMES]
            raise ConfigError(
                f'{key}: patterns must match a name, but "{pattern}" matches none of '
                f"{len(names)} names, such as {', '.join(some) or 'none'}"
            )
        found.update(hits)
    return [name for name in names if name in found]
