"""Import objects that a file or a command line names as ``module:name``."""

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hpctrain.core.errors import ConfigError, HpctrainError

NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

_MAX_NAMED = 50  # largest number of valid names in a message


def make_importable(folder: Path) -> None:
    """Put ``folder`` first in ``sys.path``, as for a script in that folder."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def resolve(
    target: str,
    where: str,
    *,
    remedy: str = "put it next to the configuration file or install it",
    error_type: type[HpctrainError] = ConfigError,
) -> Any:
    """Import the module of ``target`` and return the object that it names.

    Args:
        target: ``"module:name"``.
        where: where ``target`` is given, such as a key of a file; for messages.
        remedy: what to do if the module does not exist; for messages.
        error_type: class of the errors.

    Raises:
        HpctrainError: the module or the name does not exist; an error of class ``error_type``.
    """
    if not NAME.fullmatch(target):
        raise error_type(f'{where} must be "module:function", got "{target}"')
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # If the module exists but one of its imports fails, report that import.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            remedy = ""
            if (error.name or "").startswith("horovod"):
                remedy = "; write `import hpctrain as hvd` for `import horovod.torch as hvd`"
            raise error_type(
                f'{where} = "{target}" cannot be imported: {error}{remedy}'
            ) from error
        raise error_type(
            f'{where} = "{target}": there is no module {error.name}; {remedy}'
        ) from None
    return member(module, name, where, error_type=error_type)


def member(
    module: ModuleType, name: str, where: str, *, error_type: type[HpctrainError] = ConfigError
) -> Any:
    """Return the attribute ``name`` of a module.

    Raises an error of class ``error_type`` if the module has no attribute ``name``. ``where`` is
    as in ``resolve``.
    """
    if not hasattr(module, name):
        public = [each for each in vars(module) if not each.startswith("_")]
        raise error_type(
            f"{where}: {module.__name__} has no {name}"
            f"{hint(name, public) or '; name one of its functions or classes'}"
        )
    return getattr(module, name)


def call(
    function: Callable[..., Any], first: tuple[Any, ...], args: Mapping[str, Any], key: str
) -> Any:
    """Check the arguments by ``check_arguments``, and return ``function(*first, **args)``."""
    check_arguments(function, len(first), args, key)
    return function(*first, **args)


def check_arguments(
    function: Callable[..., Any], num_first: int, args: Mapping[str, Any], key: str
) -> None:
    """Raise ``ConfigError`` unless ``function`` accepts these arguments.

    ``num_first`` is the number of positional arguments; ``args`` are the keyword arguments;
    ``key`` is the configuration key of ``args``, for messages.
    """
    if not callable(function):
        raise ConfigError(
            f"{key.replace('.args', '.target')} must name a function, got an object of type "
            f"{type(function).__name__}"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # functions in C may lack a signature; they check their arguments
        return
    try:
        signature.bind(*range(num_first), **args)
    except TypeError as error:
        valid = list(signature.parameters)[num_first:]
        name = getattr(function, "__name__", str(function))
        wrong = next((each for each in args if each not in valid), "")
        verb = "is " if str(error).startswith("missing") else ""
        if num_first and str(error).startswith("too many"):
            verb = f"is called with positional arguments ({num_first} in all): "
        raise ConfigError(f"{key}: {name} {verb}{error}{hint(wrong, valid)}") from None


def file_of(target: str) -> tuple[Path, ...]:
    """Return the file of the module of ``target``; empty if the module has no file.

    The caller must have imported the module by ``resolve``.
    """
    file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
    return (Path(file),) if file else ()


def hint(name: str, valid: Iterable[str]) -> str:
    """Return the end of a message about a wrong name: the closest or all valid names."""
    by_lower = {each.lower(): each for each in valid}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    if close:
        return f"; did you mean {by_lower[close[0]]}?"
    few = 0 < len(by_lower) <= _MAX_NAMED
    return f"; valid names: {', '.join(sorted(by_lower.values()))}" if few else ""
