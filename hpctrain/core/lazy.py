"""Names and modules that are loaded at their first use.

Public names follow PEP 562: the stub next to a package's ``__init__``, which type checkers read
too, lists the module of each name, in lines ``from MODULE import NAME as NAME``, or ``ALIAS =
NAME``.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_ALIAS = re.compile(r"^(\w+) = (\w+)$", re.MULTILINE)
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


@contextmanager
def postponed(package: str, but: str) -> Iterator[None]:
    """Load modules that the block imports when an attribute is first read.

    This concerns the modules of ``package``, except the modules of its sub-package ``but``.

    ``from PACKAGE import MODULE`` reads none; ``from MODULE import NAME`` loads the module.
    """
    finder = _Postponing(f"{package}.", f"{but}.")
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.withdraw()


class _Postponing(MetaPathFinder, Loader):
    """Finds stand-ins for modules whose names begin with ``prefix`` and not with ``but``.

    Only the modules that import a stand-in keep it: libraries that inspect ``sys.modules`` would
    load the module at a time when its own imports may be incomplete.
    """

    def __init__(self, prefix: str, but: str) -> None:
        self._prefix, self._but = prefix, but
        self._names = list[str]()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self._prefix) or fullname.startswith(self._but):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.submodule_search_locations is not None:
            return spec
        self._names.append(fullname)
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, self.withdraw)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing: the stand-in loads the module."""

    def withdraw(self) -> None:
        """Let the import system find the modules again instead of their stand-ins."""
        while self._names:
            parent, _, name = self._names.pop().rpartition(".")
            del sys.modules[f"{parent}.{name}"]
            delattr(sys.modules[parent], name)


class _StandIn(ModuleType):
    """Reads its attributes from the module of its name."""

    def __init__(self, name: str, withdraw: Callable[[], None]) -> None:
        super().__init__(name)
        self._withdraw = withdraw

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which the import system asks for
            raise AttributeError(name)
        self._withdraw()
        path = list(sys.meta_path)
        sys.meta_path[:] = [each for each in path if not isinstance(each, _Postponing)]
        try:
            module = importlib.import_module(self.__name__)
        finally:
            sys.meta_path[:] = path
        return getattr(module, name)
