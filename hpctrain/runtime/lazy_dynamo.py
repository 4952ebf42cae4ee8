"""Lazy import of ``torch._dynamo``: only programs that compile load the package.

``torch.optim`` calls ``torch._dynamo.disable`` at the first call of four methods of an optimizer
and ``torch._dynamo.graph_break`` around each step. Outside of compiled code both are no-ops, but
the import of the package takes one second of CPU time and 70 MB on every rank. A stub in
``sys.modules`` implements these two functions. Access to any other name, or the import of a
submodule, as by ``torch.compile``, replaces the stub by the package.
"""

import importlib
import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hpctrain.core.torch_compat import DYNAMO, set_dynamo


class DynamoStub(ModuleType):
    """Stub of ``torch._dynamo`` in ``sys.modules`` until the package is needed."""

    def __init__(self) -> None:
        super().__init__(DYNAMO)
        self.__dict__.update(__path__=[], undecided=[], lock=threading.RLock())

    def graph_break(self, msg: str = "") -> None:
        """No-op, as in the package outside of compiled code."""

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """Return ``fn`` unchanged if torch calls with ``wrapping=False``; else load the package.

        If the package is loaded later, ``load`` makes torch call ``disable`` for ``fn`` again.
        """
        if fn is None or options.get("wrapping", True):
            return load(self).disable(fn, *args, **options)
        self.undecided.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        """Load the package, except for dunder names, which only the import system reads."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(load(self), name)


class Finder:
    """Import hook: load the package when one of its submodules is imported."""

    def __init__(self, stub: DynamoStub) -> None:
        self.stub = stub
        self.specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, *_path_and_target: object) -> ModuleSpec | None:
        """If ``name`` is a submodule, load the package and return the spec; else return None."""
        if not name.startswith(f"{DYNAMO}.") or sys.modules.get(DYNAMO) is not self.stub:
            return None
        load(self.stub)
        if name not in sys.modules:
            return importlib.util.find_spec(name)
        self.specs[name] = sys.modules[name].__spec__
        return importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, which the import of the package has loaded."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the module, which is already executed."""
        module.__spec__ = self.specs.pop(module.__name__)


def load(stub: DynamoStub) -> ModuleType:
    """Replace the stub by the package, and return the package.

    torch stores the result of ``disable`` in an attribute of each function. Without the attribute,
    torch calls ``disable`` of the package at the next call of the function.
    """
    with stub.lock:
        if sys.modules.get(DYNAMO) is stub:
            set_dynamo(None)
            importlib.import_module(DYNAMO)
            for function in stub.undecided:
                function.__dict__.pop("__dynamo_disable", None)
        return sys.modules[DYNAMO]


def install() -> None:
    """Install the stub, unless the package is loaded."""
    if DYNAMO not in sys.modules:
        stub = DynamoStub()
        set_dynamo(stub)
        sys.meta_path.insert(0, Finder(stub))
