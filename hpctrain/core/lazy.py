"""Names and modules that are loaded at their first use.

Public names follow PEP 562: the stub next to a package's ``__init__``, which type checkers read
too, lists the module of each name, in lines ``from MODULE import NAME as NAME``.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_IMPORT = re.compile(r"^from (\S+) import \(?\s*(\w+) as", re.MULTILINE)


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


@contextmanager
def postponed(package: str) -> Iterator[None]:
    """Execute modules of ``package`` that the block imports when an attribute is first read.

    ``from PACKAGE import MODULE`` reads none; ``from MODULE import NAME`` executes the module.
    """
    finder = _Postponing(f"{package}.")
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Postponing(MetaPathFinder):
    """Finds the modules whose names begin with ``prefix``; packages are executed at once."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None or spec.submodule_search_locations is not None:
            return None
        spec.loader = LazyLoader(spec.loader)
        return spec
