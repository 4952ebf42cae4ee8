"""Detection of an installed Horovod and of its MPI library, without importing Horovod."""

import mmap
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

Find = Callable[[str], metadata.Distribution]
"""Function that finds an installed package by name, or raises ``PackageNotFoundError``."""

_MODULE = re.compile(r"horovod/torch/mpi_lib_v2\.[^/]*so")
_LIBMPI = re.compile(rb"\0(libmpi(?:ch|_\w+)?(?:_\d+)?\.so\.\d+)\0")


def needed_mpi(find: Find = metadata.distribution) -> str | None:
    """Return the MPI library that the installed Horovod loads, such as ``libmpi.so.40``.

    The result is empty if Horovod was built without torch or MPI, and None if Horovod is not
    installed.
    """
    try:
        files = find("horovod").files or ()
    except metadata.PackageNotFoundError:
        return None
    module = next((file for file in files if _MODULE.fullmatch(file.as_posix())), None)
    return needed_by(Path(str(module.locate()))) if module else ""


_HOROVOD = re.compile(r"^[ \t]*(?:import|from)[ \t]+horovod\b", re.MULTILINE)


def without_horovod(argv: Sequence[str]) -> str:
    """Return a note if a command's script imports Horovod, which is not installed; else empty."""
    script = next((word for word in argv if word.endswith(".py")), "")
    try:
        text = Path(script).read_text(encoding="utf-8") if script else ""
    except (OSError, UnicodeDecodeError):
        return ""
    is_shim = "shim" in argv[: argv.index(script)] if script else True
    if is_shim or not _HOROVOD.search(text) or needed_mpi() is not None:
        return ""
    return (
        f"horovod must be installed for {script}, but is not; run the unchanged script with "
        f"`hpctrain shim {script}` instead of `python {script}`"
    )


def needed_by(module: Path) -> str:
    """Return the name of the MPI library that a compiled module needs; empty if it needs none."""
    try:
        with module.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            match = _LIBMPI.search(view)
            return match[1].decode() if match else ""
    except (OSError, ValueError):
        return ""
