"""From a name in the configuration to the object it means, and to the call of it."""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hpctrain.core.errors import ConfigError


def make_importable(folder: Path) -> None:
    """Let modules in ``folder`` be found before all others, as if its script were started."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def resolve(target: str, key: str) -> Callable[..., Any]:
    """The function that ``target``, a ``"module:function"``, names.

    Args:
        target: the value of the key.
        key: its dotted name, for the message.

    Raises:
        ConfigError: there is no such module or function.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f'{key} names a function as "module:function", got "{target}"')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists but misses an import of its own says so itself.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f'{key} = "{target}" cannot be imported: {error}') from error
        raise ConfigError(
            f'{key} = "{target}": there is no module {error.name}; '
            "put it beside the configuration file or install it"
        ) from None
    return member(module, name, key)


def member(module: ModuleType, name: str, key: str) -> Callable[..., Any]:
    """The function or class ``name`` of ``module``.

    Raises:
        ConfigError: there is none.
    """
    found = getattr(module, name, None)
    if not callable(found):
        public = [
            each
            for each, value in vars(module).items()
            if callable(value) and not each.startswith("_")
        ]
        raise ConfigError(f"{key}: {module.__name__} has no {name} to call{_hint(name, public)}")
    return found  # type: ignore[no-any-return]


def call(
    function: Callable[..., Any], first: Iterable[Any], args: Mapping[str, Any], key: str
) -> Any:
    """Call ``function(*first, **args)``; arguments that it does not take are the user's error.

    Raises:
        ConfigError: names the arguments that are missing or too many, and those that exist.
    """
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
        raise ConfigError(f"{key}: {name} {verb}{error}{_hint(wrong, valid)}") from None


def _hint(name: str, valid: list[str]) -> str:
    by_lower = {each.lower(): each for each in valid}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    if close:
        return f"; did you mean {by_lower[close[0]]}?"
    return f"; there are {', '.join(sorted(valid))}" if 0 < len(valid) <= 40 else ""
