"""Tools of a machine for building Horovod; looked at without building anything."""

import importlib.util
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hpctrain.cluster import cores
from hpctrain.cluster.memory import available_bytes
from hpctrain.core.errors import LaunchError
from hpctrain.launch.horovod import mpi as mpis
from hpctrain.launch.horovod.mpi import Mpi, which
from hpctrain.launch.horovod.sdist import USUAL_STANDARD, standard_of
from hpctrain.launch.program import ask

CMAKE_NEEDED = (3, 13)
COMPILERS = ("c++", "g++", "clang++")
ANSWER_S = 60.0
"""A first start from a shared file system may take long."""

_TRY = "#include <concepts>\n#include <vector>\nint main() { return 0; }\n"
_CUDA = re.compile(r"^cuda\b[^=]*=\s*'([\d.]+)'", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """A C++ compiler."""

    path: Path
    error: str = ""
    """Why it does not compile a small program of the standard; empty where it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuda:
    """What ``--gpu nccl`` takes."""

    torch: str = ""
    """The version of CUDA that torch was built with; empty for a torch without."""
    nvcc: Path | None = None
    nccl: Path | None = None
    """``nccl.h``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """All of it; None and empty words for what is missing."""

    implementation: str = "cpython"
    has_pip: bool = True
    managed: str = ""
    """The file by which a system forbids pip to install into its Python."""
    header: Path = Path("Python.h")
    """Where ``Python.h`` of this Python belongs."""
    has_header: bool = True
    torch: str = ""
    """Its version."""
    standard: int = USUAL_STANDARD
    """Of C++, that torch needs."""
    compiler: Compiler | None = None
    cmake: Path | None = None
    """One that is new enough."""
    maker: Path | None = None
    """``make`` or ``ninja``."""
    mpi: Mpi | None = None
    mpi_error: str = ""
    """Why there is none."""
    mpicxx: Path | None = None
    has_mpi_header: bool = True
    memory_bytes: int | None = None
    """Left for this process; None where the system does not tell."""
    num_cores: int = 1
    folder: Path = Path("/tmp")  # noqa: S108 - replaced by the one that tempfile chooses
    """Where it is compiled."""
    disk_bytes: int = 0
    """Free there."""
    cuda: Cuda = Cuda()

    @property
    def to_fetch(self) -> tuple[str, ...]:
        """What pip can bring for the time of the build."""
        needed = {"cmake": self.cmake, "ninja": self.maker}
        return tuple(name for name, path in needed.items() if path is None)


def look(environ: Mapping[str, str] | None = None) -> Tools:
    """Look at this machine, in about a second.

    Args:
        environ: of the build; None for this process's own.
    """
    environ = os.environ if environ is None else environ
    mpi, mpi_error = find_mpi(environ)
    mpicxx = mpis.find_compiler(mpi, environ) if mpi else None
    torch = _folder_of_torch()
    standard = standard_of(torch) if torch else USUAL_STANDARD
    folder = Path(tempfile.gettempdir())
    include = Path(sysconfig.get_path("platinclude"))
    headers = [Path(sysconfig.get_path(name)) / "Python.h" for name in ("include", "platinclude")]
    return Tools(
        implementation=sys.implementation.name,
        has_pip=importlib.util.find_spec("pip") is not None,
        managed=managed(),
        header=include / "Python.h",
        has_header=any(path.exists() for path in headers),
        torch=torch_version(),
        standard=standard,
        compiler=find_compiler(environ, standard),
        cmake=find_cmake(environ),
        maker=which("make", environ) or which("ninja", environ),
        mpi=mpi,
        mpi_error=mpi_error,
        mpicxx=mpicxx,
        has_mpi_header=mpicxx is None or mpis.has_header(mpicxx),
        memory_bytes=available_bytes(),
        num_cores=len(cores.affinity()),
        folder=folder,
        disk_bytes=_free_bytes(folder),
        cuda=find_cuda(environ, torch),
    )


def find_mpi(environ: Mapping[str, str] | None = None) -> tuple[Mpi | None, str]:
    """Return the MPI of this environment, or why there is none."""
    try:
        return mpis.find(environ), ""
    except LaunchError as error:
        return None, str(error)


def torch_version() -> str:
    """Return the version of the installed torch, empty where there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def managed() -> str:
    """Return the file that forbids to install into this Python (PEP 668), or nothing."""
    mark = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    return str(mark) if sys.prefix == sys.base_prefix and mark.exists() else ""


def find_compiler(environ: Mapping[str, str], standard: int) -> Compiler | None:
    """Find the C++ compiler, ``CXX`` before all others, and let it try the standard."""
    names = environ.get("CXX", "").split()[:1] or COMPILERS
    found = next(filter(None, (which(name, environ) for name in names)), None)
    if found is None:
        return None
    try:
        line = (found, f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", "-")
        done = ask(line, environ, text=_TRY, timeout_s=ANSWER_S)
    except OSError as error:
        return Compiler(path=found, error=str(error))
    said = done.stderr.strip().partition("\n")[0]
    error_text = (said or f"exit code {done.returncode}") if done.returncode else ""
    return Compiler(path=found, error=error_text)


def find_cmake(environ: Mapping[str, str]) -> Path | None:
    """Find a cmake that is new enough."""
    found = which("cmake", environ)
    if found is None:
        return None
    try:
        text = ask([found, "--version"], environ, timeout_s=ANSWER_S).stdout
    except OSError:
        return None
    match = re.search(r"version (\d+)\.(\d+)", text)
    return found if match and (int(match[1]), int(match[2])) >= CMAKE_NEEDED else None


def find_cuda(environ: Mapping[str, str], torch: Path | None) -> Cuda:
    """Find CUDA's compiler and NCCL's header where Horovod looks for them."""
    try:
        text = (torch / "version.py").read_text(encoding="utf-8") if torch else ""
    except OSError:
        text = ""
    version = _CUDA.search(text)
    homes = [environ.get(name, "") for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    homes = [*filter(None, homes), "/usr/local/cuda"]
    nvcc = which("nvcc", environ) or _first(Path(home) / "bin" / "nvcc" for home in homes)
    tree = [str(nvcc.resolve().parent.parent)] if nvcc else []
    nccl = filter(None, (environ.get("HOROVOD_NCCL_HOME"), environ.get("NCCL_HOME")))
    includes = [Path(home) / "include" for home in (*nccl, *tree, *homes, "/usr")]
    if named := environ.get("HOROVOD_NCCL_INCLUDE"):
        includes.insert(0, Path(named))
    return Cuda(
        torch=version[1] if version else "",
        nvcc=nvcc,
        nccl=_first(include / "nccl.h" for include in includes),
    )


def _first(paths: Iterator[Path]) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def _folder_of_torch() -> Path | None:
    spec = importlib.util.find_spec("torch")  # finds it, and does not import it
    return Path(spec.origin).parent if spec and spec.origin else None


def _free_bytes(folder: Path) -> int:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
