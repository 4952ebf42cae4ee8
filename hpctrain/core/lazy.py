"""Names that are loaded at their first use; public ones of a package by PEP 562.

The stub beside a package's ``__init__``, which type checkers read too, says where each name is: a
line ``from MODULE import NAME as NAME``.
"""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IMPORT = re.compile(r"^from (\S+) import \(?\s*(\w+) as", re.MULTILINE)


def imported(target: str) -> Any:
    """Import the module of ``"module:name"``, and return the object of that name.

    For implementations that a table lists by name, of which a program uses few.
    """
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def exports(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the ``__getattr__``, ``__dir__`` and ``__all__`` of a package, whose file is given."""
    stub = Path(file).with_suffix(".pyi").read_text("utf-8")
    module_of = {name: module for module, name in _IMPORT.findall(stub)}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module_of[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return load, names, sorted(module_of)
