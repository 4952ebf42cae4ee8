"""Functions of the user, named as ``module:function``."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from hpctrain.core.errors import DataError

NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def resolve(target: str, where: str) -> Any:
    """Return what ``module:function`` names; the current folder is searched first.

    Args:
        target: the name.
        where: what named it, for errors.

    Raises:
        DataError: there is no such module, or no such name in it.
    """
    if not NAME.fullmatch(target):
        raise DataError(f"{where} names a function as module:function, got {target!r}")
    module_name, _, name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists but misses an import of its own says so itself.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise DataError(f"{where} {target} cannot be imported: {error}") from error
        raise DataError(
            f"{where} {target}: there is no module {error.name}; go to its folder, or install it"
        ) from None
    if not hasattr(module, name):
        raise DataError(f"{where} {target}: {module.__name__} has no {name}; check the name")
    return getattr(module, name)


def file_of(target: str) -> tuple[Path, ...]:
    """Return the file of a module that ``resolve`` has imported, where it has one."""
    file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
    return (Path(file),) if file else ()
