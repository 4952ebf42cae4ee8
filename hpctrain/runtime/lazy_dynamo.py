"""``torch._dynamo`` loaded by those who compile, and not by every optimizer.

``torch.optim`` calls ``torch._dynamo.disable`` at the first call of four methods of an optimizer
and ``torch._dynamo.graph_break`` around each step. Outside of what is compiled both do nothing,
and importing the package for them takes a second of processor time and 70 MB on every rank. A
stand-in in ``sys.modules`` answers these two; any other name of it, any import of one of its
modules, and so ``torch.compile``, loads the package itself in its place.
"""

import importlib
import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hpctrain.core.torch_compat import DYNAMO, set_dynamo


class StandIn(ModuleType):
    """What lies in ``sys.modules`` until more of the package is needed."""

    def __init__(self) -> None:
        super().__init__(DYNAMO)
        self.__dict__.update(__path__=[], undecided=[], lock=threading.RLock())

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, as the package does where nothing is compiled."""

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """Hand back a function that torch marks at its first call; the package marks any other."""
        if fn is None or options.get("wrapping", True):
            return load(self).disable(fn, *args, **options)
        self.undecided.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        """Answer with the package; the import system itself asks only for names it may lack."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(load(self), name)


class Finder:
    """Loads the package as soon as one of its modules is imported, which is there then."""

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        self.specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, *_path_and_target: object) -> ModuleSpec | None:
        """Return nothing, unless the stand-in was taken for the package of this module."""
        if not name.startswith(f"{DYNAMO}.") or sys.modules.get(DYNAMO) is not self.stand_in:
            return None
        load(self.stand_in)
        if name not in sys.modules:
            return importlib.util.find_spec(name)
        self.specs[name] = sys.modules[name].__spec__
        return importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that came with the package."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Give it back the description that it had; it has run."""
        module.__spec__ = self.specs.pop(module.__name__)


def load(stand_in: StandIn) -> ModuleType:
    """Put the package in the place of its stand-in; it decides anew on what was handed back."""
    with stand_in.lock:
        if sys.modules.get(DYNAMO) is stand_in:
            set_dynamo(None)
            importlib.import_module(DYNAMO)
            for function in stand_in.undecided:
                function.__dict__.pop("__dynamo_disable", None)
        return sys.modules[DYNAMO]


def install() -> None:
    """Put the stand-in there, unless the package has been loaded already."""
    if DYNAMO not in sys.modules:
        stand_in = StandIn()
        set_dynamo(stand_in)
        sys.meta_path.insert(0, Finder(stand_in))
