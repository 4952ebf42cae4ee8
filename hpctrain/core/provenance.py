"""Facts that somebody needs to repeat what was measured: versions, processor, commit."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hpctrain import __version__

_SHOWN = ("torch", "numpy", "mpi4py", "h5py")


def versions() -> dict[str, str | None]:
    """Return the versions of this package and of what it stands on; None for what is missing."""
    own = {"hpctrain": __version__, "python": platform.python_version()}
    return {**own, **{name: _version(name) for name in _SHOWN}}


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model of the processor as the system calls it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
