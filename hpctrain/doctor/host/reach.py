"""The MPI libraries that programs of this environment would find, beside the one in use."""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpctrain.cluster.libraries import family, libmpi_of
from hpctrain.doctor.host.facts import Reached

_VERSIONED = re.compile(r"\.so\.\d")
"""A libmpi.so that is no link to such a file is a text for the linker."""


def reached(environ: Mapping[str, str]) -> tuple[Reached, ...]:
    """List the libraries that LD_LIBRARY_PATH and the first ``mpirun`` of PATH lead to."""
    found: dict[tuple[Path, str], Reached] = {}
    for each in (*_of_folders(environ), *_of_mpirun(environ)):
        found.setdefault((each.library, each.by), each)
    return tuple(found.values())


def libraries_in(folder: Path) -> list[Path]:
    """Return the MPI libraries of a folder, one of each MPI, with links followed."""
    try:
        names = sorted(folder.glob("libmpi*.so*"), key=lambda path: len(path.name))
    except OSError:
        return []
    found = libmpi_of(f"- - - - - {path.absolute()}" for path in names)
    real = [path for each in found if _VERSIONED.search((path := each.resolve()).name)]
    by_tree = {(path.parent, family(path)): path for path in real}
    own = [path for path in by_tree.values() if family(path) != "abi"]
    return own or list(by_tree.values())


def _of_folders(environ: Mapping[str, str]) -> Iterator[Reached]:
    for word in environ.get("LD_LIBRARY_PATH", "").split(":"):
        if word:
            for library in libraries_in(Path(word)):
                yield Reached(library=library, by="LD_LIBRARY_PATH")


def _of_mpirun(environ: Mapping[str, str]) -> Iterator[Reached]:
    word = shutil.which("mpirun", path=environ.get("PATH"))
    if word is None:
        return
    program = Path(word)
    # A link to /usr/bin/orterun, by way of /etc/alternatives, ends in the tree of the library.
    for tree in dict.fromkeys((program.parent.parent, program.resolve().parent.parent)):
        for folder in (tree / "lib", tree / "lib64", *sorted((tree / "lib").glob("*-linux-gnu"))):
            for library in libraries_in(folder):
                yield Reached(library=library, by="mpirun", program=program)
                return
