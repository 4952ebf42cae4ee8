"""The import hook: ``horovod`` and all below it are made here, whatever is installed."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ClassVar

from hpctrain.core.errors import ConfigError
from hpctrain.horovod.shim.modules import MARK, MODULES, fill, refusal

TOP = "horovod"


class AliasFinder(MetaPathFinder, Loader):
    """Finds the modules of ``MODULES``; others of Horovod's are an error that says why."""

    hpctrain_shim: ClassVar[bool] = True
    """By this it is known to those who want the real Horovod."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - Python's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return how a module is made; None if it is not Horovod's.

        Raises:
            ImportError: it is, and there is nothing to stand for it.
        """
        if fullname in MODULES:
            return ModuleSpec(fullname, self, origin="hpctrain", is_package=True)
        if fullname.startswith(f"{TOP}."):
            # No ModuleNotFoundError: Python would put a message of its own in its place where a
            # name is imported from a module.
            raise ImportError(refusal(fullname), name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an ordinary module, which cloudpickle takes for one."""

    def exec_module(self, module: ModuleType) -> None:
        """Give it its names."""
        fill(module)


def is_installed() -> bool:
    """Say whether ``import horovod`` finds ours in this process."""
    return any(isinstance(each, AliasFinder) for each in sys.meta_path)


def install() -> None:
    """Let ``import horovod`` find ours from now on, in this process.

    Not collective. Harmless when called again.

    Raises:
        ConfigError: Horovod itself was imported before.
    """
    if is_installed():
        return
    loaded = sys.modules.get(TOP)
    if loaded is not None and not hasattr(loaded, MARK):
        raise ConfigError(
            "the shim stands for Horovod only where that was not imported before, it has come "
            f"from {getattr(loaded, '__file__', None)}; call hpctrain.horovod.shim.install() first"
        )
    sys.meta_path.insert(0, AliasFinder())


def uninstall() -> None:
    """Let ``import horovod`` find what is installed again; who has imported ours keeps it."""
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, AliasFinder)]
    for name in [name for name, module in sys.modules.items() if hasattr(module, MARK)]:
        del sys.modules[name]
