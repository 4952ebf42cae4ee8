"""Public names that are loaded at their first use (PEP 562).

The stub beside a package's ``__init__``, which type checkers read too, says where each name is: a
line ``from MODULE import NAME as NAME``, or ``ALIAS = NAME``.
"""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ALIAS = re.compile(r"^(\w+) = (\w+)$", re.MULTILINE)
_IMPORT = re.compile(r"^from (\S+) import \(?\s*(\w+) as", re.MULTILINE)


def exports(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the ``__getattr__``, ``__dir__`` and ``__all__`` of a package, whose file is given."""
    stub = Path(file).with_suffix(".pyi").read_text("utf-8")
    module_of = {name: module for module, name in _IMPORT.findall(stub)}
    alias_of = dict(_ALIAS.findall(stub))

    def load(name: str) -> Any:
        if name in alias_of:
            return getattr(sys.modules[package], alias_of[name])
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module_of[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *alias_of})

    return load, names, sorted([*module_of, *alias_of])
