"""The MPI that Horovod is built against: the one whose library mpi4py loads."""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from hpctrain.cluster.libraries import family
from hpctrain.launch.pmi import TIMEOUT_S, load
from hpctrain.launch.program import ask

_VERSIONS = (
    ("openmpi", re.compile(r"Open MPI v([\w.]+)")),
    ("intelmpi", re.compile(r"Intel\(R\) MPI Library ([\w.]+)")),
    ("craympich", re.compile(r"CRAY MPICH version\s+([\w.]+)")),
    ("mvapich", re.compile(r"MVAPICH2? Version\s*:\s*([\w.]+)")),
    ("mpich", re.compile(r"MPICH Version:\s*([\w.]+)")),
)
NAMES = {
    "openmpi": "Open MPI",
    "intelmpi": "Intel MPI",
    "craympich": "Cray MPICH",
    "mvapich": "MVAPICH",
    "mpich": "MPICH",
    "mpi": "MPI",
}
"""How people call them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mpi:
    """An MPI library."""

    vendor: str
    """A key of ``NAMES``."""
    version: str
    library: Path
    """The file, with links followed."""

    @property
    def label(self) -> str:
        """As it stands in the version of a wheel: ``openmpi5.0.11``."""
        return f"{self.vendor}{self.version}"

    @property
    def is_of_environment(self) -> bool:
        """Whether a package of this environment brought it."""
        return self.library.is_relative_to(Path(sys.prefix).resolve())

    @property
    def place(self) -> str:
        """Tell a site's library from another one of the same version; empty in an environment."""
        if self.is_of_environment:
            return ""
        return f"{crc32(os.fsencode(self.library.parent)):08x}"

    def __str__(self) -> str:
        return f"{NAMES[self.vendor]} {self.version}"


def find(environ: Mapping[str, str] | None = None) -> Mpi:
    """Ask which MPI the ranks of this environment load.

    Raises:
        LaunchError: mpi4py is not installed, or there is no library for it.
    """
    loaded = load(environ)
    library = loaded.library.resolve()
    vendor, version = parse_version(loaded.version)
    if not version:  # a library that nobody has met: its name tells it from others
        version = f"{crc32(os.fsencode(library)):08x}"
    return Mpi(vendor=vendor, version=version, library=library)


def parse_version(text: str) -> tuple[str, str]:
    """Read vendor and version from what ``MPI_Get_library_version`` says; ``mpi`` for others."""
    for vendor, pattern in _VERSIONS:
        if match := pattern.search(text):
            return vendor, match[1].rstrip(".")
    return "mpi", ""


def find_compiler(mpi: Mpi, environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the ``mpicxx`` that compiles for an MPI library, none of another MPI."""
    path = (os.environ if environ is None else environ).get("PATH", "")
    seen: set[Path] = set()
    for program in _candidates(mpi, path):
        if program in seen or not os.access(program, os.X_OK):
            continue
        seen.add(program)
        shown = _show(program)
        if shown is not None and _leads_to(shown, mpi.library, program):
            return program
    return None


def has_header(compiler: Path) -> bool:
    """Say whether an ``mpicxx`` finds the file that programs include, ``mpi.h``."""
    folders = _flagged("-I", _show(compiler) or "")
    beside = compiler.resolve().parent.parent / "include"
    return any((folder / "mpi.h").exists() for folder in (*folders, beside, Path("/usr/include")))


def _candidates(mpi: Mpi, path: str) -> Iterator[Path]:
    """Yield programs that may be it, those in the tree of the library first."""
    names = ("mpicxx", "mpic++")
    for folder in mpi.library.parents[:-1]:
        # Debian's own names for what lies in /usr/bin: the plain ones are links to either.
        yield from (folder / "bin" / f"{name}.{mpi.vendor}" for name in names)
        yield from (folder / "bin" / name for name in names)
    for folder_of_path in filter(None, path.split(":")):
        yield from (Path(folder_of_path) / name for name in names)


def _show(program: Path) -> str | None:
    """Ask a compiler wrapper for the line that it would run; None if it fails."""
    try:
        # It names its compiler, whether that is there or not.
        return ask([program, "-show"], timeout_s=TIMEOUT_S).stdout or None
    except OSError:
        return None


def _leads_to(shown: str, library: Path, program: Path) -> bool:
    """Say whether what a wrapper would link is this library."""
    folders = _flagged("-L", shown)
    if not folders:  # it leaves the folder to the linker
        return library.is_relative_to(program.resolve().parent.parent)
    return any(
        found.resolve() == library and family(found.resolve()) == family(library)
        for folder in folders
        for found in folder.glob("libmpi*.so*")
    )


def _flagged(flag: str, shown: str) -> list[Path]:
    words = shown.replace('"', "").split()
    return [Path(word.removeprefix(flag)) for word in words if word.startswith(flag)]


def which(name: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """Find a program, in this environment first, then in PATH."""
    path = (os.environ if environ is None else environ).get("PATH", "")
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{path}")
    return Path(found).absolute() if found else None
