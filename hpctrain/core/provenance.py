"""Facts that are needed to repeat a measurement: versions, processor, commit."""

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
    """Return the versions of this package and its dependencies; None for a missing package."""
    own = {"hpctrain": __version__, "python": platform.python_version()}
    return {**own, **{name: version_of(name) for name in _SHOWN}}


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the processor."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def project(folder: Path) -> dict[str, str | list[str]]:
    """Return the git commit of a folder; the result is empty outside of a repository.

    ``changed`` lists the files that differ from the commit, and ``diff`` is a hash of the
    differences. If two runs have the same commit and hash, all tracked files were identical.
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
    """Return the output of git, with undecodable bytes replaced; empty if git fails."""
    git = shutil.which("git")
    if git is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603 - fixed words
            [git, "-C", str(folder), *words], capture_output=True, check=False, timeout=_GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.decode(errors="replace")


def version_of(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
