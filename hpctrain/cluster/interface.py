"""The process management interface: what the ranks of srun find each other by.

``srun --mpi=`` names one, and it must be the one that the MPI library speaks. Otherwise some
libraries abort in words of their own, and others make a world of one of every rank.
"""

import os
import re
import site
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.cluster.env import Launched
from hpctrain.cluster.libraries import Family, family

_CRAY = re.compile(r"libmpi_(?!abi|ibm)")
"""Cray MPICH has a library for each compiler: libmpi_gnu_123.so.12."""

_NAMES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")
"""What mpi4py tries in a folder, in its order; the first is text for the linker in a wheel."""


def srun_type(library: Path) -> str:
    """Return what ``srun --mpi=`` must name for ranks with this MPI library to find each other."""
    if library.is_relative_to("/opt/cray") or _CRAY.match(library.name):
        return "cray_shasta"
    return "pmix" if owner(library) == "openmpi" else "pmi2"


def owner(library: Path) -> Family:
    """Say whose library it is; that of the standard ABI lies beside its owner's own."""
    found = family(library)
    if found != "abi":
        return found
    own = any(family(each) == "openmpi" for each in library.parent.glob("libmpi.so.*"))
    return "openmpi" if own else "mpich"


def mismatch(launched: Launched | None, library: Path | None) -> str:
    """Say that srun offers another interface than the library most likely needs.

    A guess: a site may have built its MPI for another interface, so it stops nothing by itself.

    Empty where all looks well or nothing is known; else a line with the remedy.
    """
    if library is None or launched is None or launched.name != "srun" or launched.size == 1:
        return ""
    offered, needed = launched.pmi or "none", srun_type(library)
    if offered.startswith(needed):  # pmix_v4 is a pmix
        return ""
    return (
        f"srun --mpi={offered} started {launched.size} ranks, but the MPI library {library} "
        f"finds its ranks by {needed}; should MPI stop now, start again with "
        f"`srun --mpi={needed} ...`, or inside the job with `hpctrain launch ...`"
    )


def expected_libmpi(
    environ: Mapping[str, str] | None = None, prefixes: Sequence[str] | None = None
) -> Path | None:
    """Return the MPI library that mpi4py's wheel will load, without loading it.

    None where the dynamic linker is left to find one, by LD_LIBRARY_PATH for instance.
    """
    environ = os.environ if environ is None else environ
    if named := environ.get("MPI4PY_LIBMPI"):
        return Path(named).resolve() if os.sep in named else None
    if prefixes is None:
        prefixes = (sys.prefix, site.getuserbase(), sys.base_prefix)
    files = (Path(prefix, "lib", name).resolve() for prefix in prefixes for name in _NAMES)
    return next((file for file in files if ".so." in file.name and file.is_file()), None)
