"""Facts that somebody needs to repeat what was measured: versions, processor, commit."""

import platform
import shutil
import subprocess
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hpctrain import __version__

_SHOWN = ("torch", "numpy", "mpi4py", "h5py")
_GIT_S = 10.0


def versions() -> dict[str, str | None]:
    """Return the versions of this package and of what it stands on; None for what is missing."""
    own = {"hpctrain": __version__, "python": platform.python_version()}
    return {**own, **{name: version_of(name) for name in _SHOWN}}


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model of the processor as the system calls it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def project(folder: Path) -> dict[str, str | list[str]]:
    """Return the commit of a folder's project; empty where git knows none.

    Where files differ from it they are ``changed``, and ``diff`` is a hash of how: two runs with
    the same commit and the same hash had the same files, but for new ones.
    """
    head = _git(folder, "rev-parse", "HEAD").strip()
    if not head:
        return {}
    changed = _git(folder, "diff", "--name-only", "HEAD").splitlines()
    if not changed:
        return {"commit": head}
    diff = sha256(_git(folder, "diff", "HEAD").encode()).hexdigest()[:16]
    return {"commit": head, "changed": changed, "diff": diff}


def _git(folder: Path, *words: str) -> str:
    """Return what git says, with what is no text replaced; nothing where it does not answer."""
    git = shutil.which("git")
    if git is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603 - fixed words
            [git, "-C", str(folder), *words],
            capture_output=True,
            check=False,
            timeout=_GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.decode(errors="replace")


def version_of(name: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
