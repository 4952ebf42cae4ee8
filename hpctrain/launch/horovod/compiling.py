"""From sources to a wheel: what cmake is told, and how it is run."""

import os
import shlex
import sysconfig
import tarfile
from collections.abc import Callable
from pathlib import Path

from hpctrain.core.errors import LaunchError
from hpctrain.launch.horovod.build_environment import Workshop
from hpctrain.launch.horovod.log import Log, percent_of
from hpctrain.launch.horovod.mpi import Mpi
from hpctrain.launch.horovod.sdist import VERSION
from hpctrain.launch.horovod.target import Target
from hpctrain.launch.horovod.tools import Tools

_BUILD = (
    "import sys; from setuptools.build_meta import __legacy__ as b; b.build_wheel(sys.argv[1])"
)
"""What pip does with a package that has a setup.py and nothing else."""

_WITH = {
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_GLOO": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
}


def unpack(folder: Path) -> Path:
    """Unpack the sdist that pip has put into a folder; return the folder of the sources."""
    archive = folder / f"horovod-{VERSION}.tar.gz"
    with tarfile.open(archive) as file:
        # Python 3.11.0 to 3.11.3, Debian 12's among them, have no filter; nor the argument for it.
        file.extraction_filter = getattr(tarfile, "data_filter", None)
        file.extractall(folder)  # noqa: S202 - pip has checked the hash
    return folder / f"horovod-{VERSION}"


def compile_wheel(
    workshop: Workshop,
    tools: Tools,
    target: Target,
    jobs: int,
    log: Log,
    heard: Callable[[int], None],
) -> Path:
    """Compile and return the wheel, in the workshop's folder.

    Args:
        workshop: with the unpacked and patched sources.
        tools: with which nothing is missing.
        target: what it is for.
        jobs: compilers at a time.
        log: gets all output.
        heard: is told how far it is, in percent.

    Raises:
        LaunchError: it does not compile.
    """
    assert tools.compiler is not None
    assert tools.mpi is not None
    sources, dist = workshop.folder / f"horovod-{VERSION}", workshop.folder / "dist"
    dist.mkdir()
    environ = workshop.environ | _WITH
    environ["HOROVOD_CMAKE"] = str(_cmake(workshop, tools, jobs))
    environ["HOROVOD_LOCAL_VERSION"] = target.label
    environ["CXX"] = str(tools.compiler.path)
    if tools.maker is None or tools.maker.name == "ninja":
        environ["CMAKE_GENERATOR"] = "Ninja"
    if target.gpu:
        environ["HOROVOD_GPU_OPERATIONS"] = target.gpu.upper()

    def hear(line: str) -> None:
        percent = percent_of(line)
        if percent is not None:
            heard(percent)

    line = list(map(str, (workshop.python, "-c", _BUILD, dist)))
    said = log.run(line, environ=environ, folder=sources, heard=hear)
    wheels = list(dist.glob("horovod-*.whl"))
    if said or not wheels:
        raise LaunchError(_failure(said or ["it has made no wheel"], log, jobs))
    return wheels[0]


def _failure(said: list[str], log: Log, jobs: int) -> str:
    text = "\n".join(said)
    hint = "the whole output is in the log"
    if "Killed" in text:
        hint = f"the system has ended a compiler for its memory: --jobs {max(1, jobs // 2)}"
    elif "No space left" in text:
        hint = "a disk is full: export TMPDIR=, a folder with more room"
    return f"Horovod {VERSION} did not compile; {hint}. {log.path} ends with:\n{text}"


def _cmake(workshop: Workshop, tools: Tools, jobs: int) -> Path:
    """Write the program that setup.py calls as cmake: it adds what setup.py cannot be told."""
    cmake = shlex.quote(str(tools.cmake or workshop.python.parent / "cmake"))
    options = " ".join(map(shlex.quote, options_of(tools)))
    path = workshop.folder / "cmake"
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --build ]; then exec {cmake} --build . --parallel {jobs}; fi\n'
        f'exec {cmake} "$@" {options}\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def options_of(tools: Tools) -> list[str]:
    """Return what cmake is told besides.

    The module finds torch and MPI from its own place, so that a wheel can be installed into
    another environment. It carries no debug information, 45 of its 50 MB.
    """
    assert tools.compiler is not None
    assert tools.mpi is not None
    paths = ("$ORIGIN/../../torch/lib", run_path(tools.mpi))
    return [
        f"-DCMAKE_CXX_COMPILER={tools.compiler.path}",
        f"-DMPI_CXX_COMPILER={tools.mpicxx}",
        "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -DNDEBUG",  # its CMakeLists.txt makes it -O3
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        f"-DCMAKE_INSTALL_RPATH={';'.join(paths)}",
    ]


def run_path(mpi: Mpi) -> str:
    """Return where the module looks for the MPI library: beside itself, or at the site's place."""
    folder = mpi.library.parent
    if not mpi.is_of_environment:
        return str(folder)
    module = Path(sysconfig.get_path("platlib")).resolve() / "horovod" / "torch"
    return f"$ORIGIN/{os.path.relpath(folder, module)}"
