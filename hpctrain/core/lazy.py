"""Lazy imports of public names and of modules.

Packages load public names as in PEP 562. The stub file ``__init__.pyi`` of a package, which type
checkers also read, defines the names by lines ``from MODULE import NAME as NAME`` or ``ALIAS =
NAME``.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_ALIAS = re.compile(r"^(\w+) = (\w+)$", re.MULTILINE)
_IMPORT = re.compile(r"^from (\S+) import \(?\s*(\w+) as", re.MULTILINE)


def imported(target: str) -> Any:
    """Import the module of ``"module:name"`` and return the object ``name``.

    Tables of implementations use this function, because a program needs only a few
    implementations.
    """
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def exports(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package from its stub file.

    ``file`` is ``__file__`` of the package.
    """
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
    """Load a module that the block imports only when one of its attributes is read.

    This applies to the modules of ``package``, except the modules of its sub-package ``but``.
    ``from PACKAGE import MODULE`` reads no attribute of the module; ``from MODULE import NAME``
    reads one and therefore loads the module.
    """
    finder = _Postponing(f"{package}.", f"{but}.")
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.withdraw()


class _Postponing:
    """Import hook: loads a placeholder for each module ``prefix*``, except modules ``but*``.

    The class has the methods of a finder and of a loader, but not their base classes, because
    ``importlib.abc`` imports 20 modules, which would double the time of ``import hpctrain``.
    ``withdraw`` removes the placeholders from ``sys.modules``. Otherwise a library that inspects
    ``sys.modules`` would read attributes of a placeholder and thereby load the module, possibly
    before the modules that it imports are complete.
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
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name, self.withdraw)

    def exec_module(self, module: ModuleType) -> None:
        """No-op: the placeholder loads the module later."""

    def withdraw(self) -> None:
        """Remove the placeholders from ``sys.modules`` and from their packages."""
        while self._names:
            parent, _, name = self._names.pop().rpartition(".")
            del sys.modules[f"{parent}.{name}"]
            delattr(sys.modules[parent], name)


class _Placeholder(ModuleType):
    """Placeholder that loads its module when one of its attributes is read."""

    def __init__(self, name: str, withdraw: Callable[[], None]) -> None:
        super().__init__(name)
        self._withdraw = withdraw

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system reads these attributes of the placeholder
            raise AttributeError(name)
        self._withdraw()
        path = list(sys.meta_path)
        sys.meta_path[:] = [each for each in path if not isinstance(each, _Postponing)]
        try:
            module = importlib.import_module(self.__name__)
        finally:
            sys.meta_path[:] = path
        return getattr(module, name)
