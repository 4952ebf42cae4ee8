"""Horovod's own package, whatever else stands under its name in ``sys.modules``."""

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.libraries import family, loaded_libmpi
from hpctrain.core.errors import LaunchError
from hpctrain.launch.installed_horovod import installed

if TYPE_CHECKING:
    from hpctrain.comm.engines.horovod_session import Session


class Library:
    """Horovod as it is loaded into this process: there is one of it, and it serves one world."""

    def __init__(self, version: str, torch: Any) -> None:
        self.version = version
        self.torch = torch
        """The module ``horovod.torch``."""
        self.internal_error: type[Exception] = torch.HorovodInternalError
        self.session: Session | None = None
        """The world that it serves at present."""


@functools.cache
def library() -> Library:
    """Load Horovod, MPI being loaded; modules that stand in for it are left as they are.

    Raises:
        LaunchError: it is not installed, does not load, or was built for another MPI.
    """
    if problem := _problem():
        raise LaunchError(_remedy(problem))
    with _unveiled():
        try:
            package = importlib.import_module("horovod")
            torch = importlib.import_module("horovod.torch")
        except (ImportError, OSError) as error:
            raise LaunchError(_remedy(f"Horovod does not load: {error}")) from error
        return Library(package.__version__, torch)


def _problem() -> str:
    """Say what keeps Horovod from being loaded, before it brings another MPI; else empty."""
    found = installed()
    if found is None:
        return "Horovod is not installed"
    if not found.needs:
        return "Horovod was built without PyTorch or without MPI"
    here = loaded_libmpi()
    if here and found.family not in [family(path) for path in here]:
        return f"Horovod was built for another MPI ({found.needs}) than {here[0]}"
    return ""


def _remedy(what: str) -> str:
    return (
        f"{what}, and the engine horovod needs it; `hpctrain horovod build` builds it for this "
        f"Python and MPI, HPCTRAIN_ENGINE=hpctrain does without"
    )


@contextmanager
def _unveiled() -> Iterator[None]:
    """Take away what stands in for Horovod, for a while; what was loaded then is kept apart.

    Where nothing stands in for it, what is loaded stays for all.
    """
    stands_in = {name: one for name, one in _modules() if not _is_real(name, one)}
    finders = list(sys.meta_path)
    sys.meta_path[:] = [one for one in finders if not getattr(one, "hpctrain_shim", False)]
    is_veiled = bool(stands_in) or len(sys.meta_path) < len(finders)
    for name in stands_in:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.meta_path[:] = finders
        if is_veiled:
            for name, _ in _modules():
                del sys.modules[name]
            sys.modules.update(stands_in)


def _modules() -> list[tuple[str, ModuleType]]:
    return [
        (name, one) for name, one in sys.modules.items() if name.partition(".")[0] == "horovod"
    ]


def _is_real(name: str, module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    stands_in = vars(module).get("__hpctrain_shim__", False)
    return spec is not None and spec.name == name and not stands_in
