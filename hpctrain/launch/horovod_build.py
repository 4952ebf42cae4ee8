"""Build of Horovod from its published sources, for the torch and MPI of this environment."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from zlib import crc32

from hpctrain.cluster.env import launched
from hpctrain.cluster.libraries import distinct, libmpi_of
from hpctrain.cluster.resources import affinity, available_bytes
from hpctrain.core.atomic import publishing, reason_of
from hpctrain.core.config import cache_folder
from hpctrain.core.errors import LaunchError
from hpctrain.core.units import GIB
from hpctrain.launch.pmi import TIMEOUT_S, Mpi, load
from hpctrain.launch.program import run_to_end, start

Report = Callable[[str], None]  # receives progress, one line per call

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""Hash of ``horovod-0.28.1.tar.gz``, the last release; pip refuses any other file."""

STANDARD = 20  # C++ standard that torch 2.13 needs; the sources of Horovod select 14
PATCHED = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
"""Files that select the C++ standard of sources with headers of torch."""

PACKAGES = ("setuptools>=70.1", "packaging", "cffi>=1.4", "cloudpickle", "psutil", "pyyaml")
"""Packages that Horovod's setup.py imports or requires."""

JOB_BYTES = 7 * GIB // 4  # memory for one compiler process; g++ 12 used at most 1.5 GiB

LOG = "build.log"  # output of the last build, in the folder of the wheel

_RECIPE = 1  # version of the build method; wheels of an older version are not reused
_REMOVED_VARIABLES = re.compile(r"HOROVOD_|MAKE|MFLAGS|CMAKE_GENERATOR")
"""Environment variables to omit: they change the build, or connect it to an enclosing make."""
_VARIABLES = {
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_GLOO": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "CMAKE_GENERATOR": "Ninja",
    "PYTHONUNBUFFERED": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_USER": "0",
}
_BUILD = (
    "import sys; from setuptools.build_meta import __legacy__ as b; b.build_wheel(sys.argv[1])"
)
"""Program that builds a wheel as pip does for a package that has only a ``setup.py``."""
_IMPORT = """
import json
import horovod.torch as hvd
print(json.dumps([bool(hvd.mpi_built()), open("/proc/self/maps").read().splitlines()]))
"""
_STANDARD = re.compile(r"^[ \t]*set\(CMAKE_CXX_STANDARD (\d+)\)", re.MULTILINE)


def build(
    report: Report,
    *,
    jobs: int | None = None,
    install: bool = True,
    wheel_dir: Path | None = None,
    force: bool = False,
) -> Path:
    """Install a Horovod wheel for the installed torch and MPI; build a wheel if none exists.

    Not collective: a single process builds.

    Args:
        report: called with each progress message, a single line.
        jobs: number of concurrent compilers; by default as many as cores and memory allow.
        install: whether the wheel is installed into this environment.
        wheel_dir: directory of the wheels, with a folder for each set of versions; by default in
            the cache of the user.
        force: build also if a wheel of these versions exists.

    Returns:
        Path of the wheel.

    Raises:
        LaunchError: the build is impossible or failed.
    """
    found = launched()
    if found is not None and found.size > 1:
        raise LaunchError(
            f"Horovod must be built by one process, but this is rank {found.rank} of "
            f"{found.size}; run `hpctrain horovod build` without a launcher"
        )
    mpi, torch = load(), _torch()
    cache = wheel_dir or (cache_folder() or Path.cwd()) / "horovod"
    folder = (cache / key_of(mpi, torch)).absolute()
    report(f"Horovod {VERSION} for torch {torch}, {mpi.name} {mpi.version} ({mpi.library})")
    wheel = None if force else max(folder.glob("horovod-*.whl"), default=None)
    kind = "built" if wheel is None else "built before, --force rebuilds it"
    if wheel is None:
        check(mpi)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"the folder of wheels must be writable, but {folder} cannot be written: "
                f"{reason_of(error)}; choose another with --wheel-dir"
            ) from None
        wheel = _make(mpi, folder, report, jobs)
    if install:
        report("installing")
        _install(wheel, folder / LOG)
        report(f"installed: horovod.torch imports, and uses {check_import(mpi)}")
    report(f"wheel: {wheel} ({kind})")
    return wheel


def check(mpi: Mpi) -> None:
    """Raise ``LaunchError`` if compilers, headers or tools for the build are missing."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    table = (
        (
            _compiler() is not None,
            f"a compiler with C++{STANDARD}: none of CXX, c++, g++ and clang++",
            "apt-get install g++ (dnf install gcc-c++), or load a module of GCC 10 or newer",
        ),
        (
            mpicxx_of(mpi) is not None,
            f"mpicxx of {mpi.library}, the MPI of the ranks: not in its folder and not in PATH",
            "apt-get install libopenmpi-dev (or libmpich-dev), or load the module of that MPI",
        ),
        (
            header.exists(),
            f"the header Python.h for extensions of Python: no file {header}",
            "apt-get install python3-dev (dnf install python3-devel), or load the Python module",
        ),
        (
            importlib.util.find_spec("pip") is not None,
            "pip, which fetches the sources and installs the wheel",
            "python -m ensurepip, or `uv pip install pip`",
        ),
    )
    missing = [f"  {what}\n    do: {do}" for is_there, what, do in table if not is_there]
    if missing:
        count = "one requirement is" if len(missing) == 1 else f"{len(missing)} requirements are"
        first = f"Horovod {VERSION} cannot be built here, because {count} missing:"
        raise LaunchError("\n".join([first, *missing]))


def mpicxx_of(mpi: Mpi) -> Path | None:
    """Return the ``mpicxx`` of an MPI library's installation, else of PATH; None if absent."""
    above = mpi.library.resolve().parents[:-1]
    # On Debian, /usr/bin has mpicxx.openmpi and mpicxx.mpich, and mpicxx links to one of them.
    folders = [*(folder / "bin" for folder in above), *map(Path, os.get_exec_path())]
    names = (f"mpicxx.{mpi.vendor}", "mpicxx", "mpic++")
    programs = (folder / name for folder in folders for name in names)
    return next((program for program in programs if os.access(program, os.X_OK)), None)


def key_of(mpi: Mpi, torch: str) -> str:
    """Return the folder name of a wheel, made of all versions that the wheel depends on."""
    library = mpi.library.resolve()
    is_own = library.is_relative_to(Path(sys.prefix).resolve())
    # Hash of the library's folder: libraries of a site may share a version, or have none.
    place = "" if is_own and mpi.version else f"{crc32(os.fsencode(library.parent)):08x}"
    python = f"{sys.implementation.name[:1]}p{sys.version_info[0]}{sys.version_info[1]}"
    machine = re.sub(r"[-.]", "_", sysconfig.get_platform())
    parts = (f"horovod{VERSION}", python + getattr(sys, "abiflags", ""), machine)
    return "-".join(filter(None, (*parts, f"torch{torch}", mpi.label, place, f"r{_RECIPE}")))


def patch(sources: Path) -> list[str]:
    """Change the C++ standard in Horovod's CMake files; return one line per change."""
    texts: dict[Path, str] = {}
    changes = []
    for name in PATCHED:
        path = sources / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        found = list(_STANDARD.finditer(text))
        if [match[1] for match in found] != ["14"]:
            lines = ", ".join(match[0].strip() for match in found) or "no such line"
            raise LaunchError(
                f"{name} of Horovod {VERSION} must have exactly one line "
                f"set(CMAKE_CXX_STANDARD 14), got {lines}; let pip download the unchanged sdist "
                f"of {VERSION}"
            )
        after = found[0][0].replace("14", str(STANDARD))
        texts[path] = text.replace(found[0][0], after)
        number = text.count("\n", 0, found[0].end()) + 1
        changes.append(f"{name}, line {number}: {found[0][0].strip()} -> {after.strip()}")
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return changes


def check_import(mpi: Mpi) -> Path:
    """Import Horovod in a separate process, and return the MPI library that Horovod loads.

    Raises:
        LaunchError: the import failed, or Horovod loads another MPI library than ranks do.
    """
    done = run_to_end([sys.executable, "-P", "-c", _IMPORT], timeout_s=4 * TIMEOUT_S)
    again = "rebuild Horovod with `hpctrain horovod build --force`"
    if done.returncode:
        error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise LaunchError(
            f"horovod.torch must import in {sys.prefix}, but its import failed: {error}; {again}"
        )
    is_built, maps = json.loads(done.stdout.strip().splitlines()[-1])
    libraries = [path.resolve() for path in distinct(libmpi_of(maps))]
    wanted = mpi.library.resolve()
    if not is_built or wanted not in libraries:
        named = ", ".join(map(str, libraries)) or "none"
        raise LaunchError(
            f"Horovod must use the MPI library that ranks load, {wanted}, but it loads "
            f"{named}; remove that library from LD_LIBRARY_PATH and LD_PRELOAD, or {again}"
        )
    return wanted


def _torch() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise LaunchError(
            "Horovod must be built against the installed torch, but torch is not installed; "
            "pip install torch"
        ) from None


def _compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a C++ compiler that supports ``STANDARD``, from ``CXX`` if set; None if not found."""
    names = environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    program = "#include <concepts>\nint main() { return 0; }\n"
    line = [found or "", f"-std=c++{STANDARD}", "-fsyntax-only", "-x", "c++", "-"]
    with suppress(OSError):
        if found and run_to_end(line, text=program, timeout_s=TIMEOUT_S).returncode == 0:
            return found
    return None


def _make(mpi: Mpi, folder: Path, report: Report, jobs: int | None) -> Path:
    """Download, patch and compile the sources; return the path of the wheel in ``folder``."""
    online = "use a machine with access to a package index, or set an index in pip.conf"
    log = folder / LOG
    log.write_text("", encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="hpctrain-horovod-") as name:
        scratch = Path(name)
        python, environ = _environment(scratch)
        report("downloading sources and tools")
        tools = [each for each in ("cmake", "ninja") if shutil.which(each) is None]
        pip = [python, "-m", "pip"]
        failure = f"pip must download the build tools, but failed; {online}"
        run_logged(log, [*pip, "install", *PACKAGES, *tools], scratch, environ, failure)
        wanted = scratch / "wanted.txt"
        wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
        # pip runs the setup.py of the sdist; setup.py imports the packages installed above.
        words = [*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        failure = f"pip must download the sources of Horovod {VERSION}, but failed; {online}"
        run_logged(log, [*words, "--dest", name, "-r", str(wanted)], scratch, environ, failure)
        sources = scratch / f"horovod-{VERSION}"
        shutil.unpack_archive(f"{sources}.tar.gz", scratch)  # pip has checked the hash
        for change in patch(sources):
            report(f"changed {change}")
        memory, num_cores = available_bytes(), len(affinity())
        fit = num_cores if memory is None else max(1, memory // JOB_BYTES)
        jobs = jobs or min(num_cores, fit)
        report(f"compiling with {jobs} concurrent compilers; all output: {log}")
        failure = (
            f"Horovod {VERSION} did not compile; if memory was exhausted, use --jobs "
            f"{jobs // 2 or 1}"
        )
        environ |= _build_variables(scratch, mpi, jobs)
        run_logged(log, [python, "-c", _BUILD, str(scratch / "dist")], sources, environ, failure)
        (wheel,) = (scratch / "dist").glob("horovod-*.whl")
        with publishing(folder / wheel.name) as part:
            shutil.copyfile(wheel, part)
        return folder / wheel.name


def _environment(scratch: Path) -> tuple[str, dict[str, str]]:
    """Create a virtual environment for build tools; return its Python and environment variables.

    Programs in the virtual environment can also import the packages of this Python installation.
    The installation is not changed.
    """
    tree = scratch / "python"
    venv.create(tree, with_pip=False, symlinks=True)
    places = sysconfig.get_paths(vars={"base": str(tree), "platbase": str(tree)})
    seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in seen]
    (Path(places["purelib"]) / "hpctrain.pth").write_text("".join(lines), encoding="utf-8")
    kept = {k: v for k, v in os.environ.items() if not _REMOVED_VARIABLES.match(k)}
    here = (str(tree / "bin"), str(Path(sys.executable).parent), *os.get_exec_path())
    path = os.pathsep.join(here)
    return str(tree / "bin" / "python"), {**kept, **_VARIABLES, "PATH": path}


def _build_variables(scratch: Path, mpi: Mpi, jobs: int) -> dict[str, str]:
    """Write a cmake wrapper script; return the environment variables that ``setup.py`` reads.

    The wrapper adds options to cmake. One option sets a relative rpath for torch and MPI, so that
    the wheel can be installed into another environment. Another option omits the debug
    information: 45 MB of a wheel of 50 MB.
    """
    where = mpi.library.resolve().parent
    if where.is_relative_to(Path(sys.prefix).resolve()):
        module = Path(sysconfig.get_path("platlib")).resolve() / "horovod" / "torch"
        where = Path("$ORIGIN") / os.path.relpath(where, module)
    options = [
        f"-DMPI_CXX_COMPILER={mpicxx_of(mpi)}",
        "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -DNDEBUG",  # CMakeLists.txt of Horovod sets -O3
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        f"-DCMAKE_INSTALL_RPATH=$ORIGIN/../../torch/lib;{where}",
    ]
    cmake = scratch / "cmake"
    cmake.write_text(
        f'#!/bin/sh\n[ "$1" != --build ] || exec cmake --build . --parallel {jobs}\n'
        f'exec cmake "$@" {shlex.join(options)}\n',
        encoding="utf-8",
    )
    cmake.chmod(0o755)
    label = f"torch{_torch()}.{mpi.label}".lower()
    return {
        "HOROVOD_CMAKE": str(cmake),
        "HOROVOD_LOCAL_VERSION": re.sub(r"[^a-z0-9]+", ".", label),
        "CXX": _compiler() or "c++",
    }


def _install(wheel: Path, log: Path) -> None:
    """Replace any installed Horovod by the wheel; then install the wheel's dependencies."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    failure = f"pip must install {wheel} into {sys.prefix}, but failed"
    for words in (["--force-reinstall", "--no-deps"], []):
        run_logged(log, [*pip, *words, str(wheel)], wheel.parent, dict(os.environ), failure)


LAST_LINES = 12  # maximum number of log lines that an error quotes

_ERROR = re.compile(
    r"\berror\b|undefined reference|No space left|Killed|No matching distribution|not find|HASHES",
    re.IGNORECASE,
)


def run_logged(
    log: Path, words: list[str], folder: Path, environ: dict[str, str], failure: str
) -> None:
    """Run a program to its end, and append its output to ``log``.

    An exception during the wait, such as ``KeyboardInterrupt``, kills the process group of the
    program.

    Args:
        log: file of the output.
        words: the command line.
        folder: working directory.
        environ: environment variables.
        failure: start of the error message.

    Raises:
        LaunchError: the exit code is not 0.
    """
    with log.open("a+", encoding="utf-8", errors="replace") as file:
        file.write(f"$ {shlex.join(words)}\n")
        file.flush()
        begin = file.tell()
        output: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT}
        with start(words, cwd=folder, env=environ, **output) as child:
            try:
                code = child.wait()
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                raise
        if code:
            file.seek(begin)
            printed = file.read().splitlines()
            lines = error_lines(printed) or [f"exit code {code} without output"]
            raise LaunchError(f"{failure}; {log} ends with:\n" + "\n".join(lines))


def error_lines(lines: list[str]) -> list[str]:
    """Return the last lines that mention an error; if no line does, the last lines of the log."""
    errors = [line for line in lines if _ERROR.search(line)]
    return (errors or [line for line in lines if line.strip()])[-LAST_LINES:]
