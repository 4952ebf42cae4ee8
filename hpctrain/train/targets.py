"""From a name in the configuration to the object it means, and to the call of it."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from hpctrain.core import target
from hpctrain.core.errors import ConfigError


def member(module: ModuleType, name: str, key: str) -> Callable[..., Any]:
    """Return the function or class ``name`` of ``module``; raises as ``resolve``."""
    return _callable(target.member(module, name, key), f"{key}: {module.__name__}:{name}")


def resolve(name: str, key: str) -> Callable[..., Any]:
    """Return the function that ``name``, a ``"module:function"`` and value of ``key``, names.

    Raises:
        ConfigError: there is no such module or function.
    """
    return _callable(target.resolve(name, key), f'{key} = "{name}"')


def _callable(found: Any, what: str) -> Callable[..., Any]:
    if not callable(found):
        raise ConfigError(
            f"{what} is of type {type(found).__name__}, nothing to call; name a function"
        )
    return found  # type: ignore[no-any-return]


def call(
    function: Callable[..., Any], first: Iterable[Any], args: Mapping[str, Any], key: str
) -> Any:
    """Call ``function(*first, **args)``; raises as ``check``."""
    first = tuple(first)
    check(function, len(first), args, key)
    return function(*first, **args)


def check(function: Callable[..., Any], num_first: int, args: Mapping[str, Any], key: str) -> None:
    """Raise if ``function`` does not take ``num_first`` positions and then ``args``.

    Raises:
        ConfigError: names the arguments that are missing or too many, and those that exist.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # functions written in C may hide it; they check for themselves
        return
    try:
        signature.bind(*range(num_first), **args)
    except TypeError as error:
        valid = list(signature.parameters)[num_first:]
        name = getattr(function, "__name__", str(function))
        wrong = next((each for each in args if each not in valid), "")
        verb = "is " if str(error).startswith("missing") else ""
        raise ConfigError(f"{key}: {name} {verb}{error}{target.hint(wrong, valid)}") from None
