"""Build backend of the package: setuptools, which also compiles ``kernel.c``.

The library calls no Python, so one wheel serves every version of Python. The variable ``CC``
selects the compiler; the default is ``cc``. On a machine without ``cc``, pip installs the package
``ziglang``, which contains a compiler, for the build. Without the library, hpctrain runs slower
Python code.
"""

import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - a build backend offers all hooks
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
    "-s",
)
_ZIG = ("-m", "ziglang", "cc", "-target")
_LOG = logging.getLogger(__name__)


def get_requires_for_build_wheel(settings: Any = None) -> list[str]:
    """Return the packages that a build requires in addition to setuptools."""
    found: list[str] = build_meta.get_requires_for_build_wheel(settings)
    return found if _compiler() else [*found, "ziglang"]


get_requires_for_build_editable = get_requires_for_build_wheel


def _compiler() -> list[str]:
    """Return the command of the C compiler of this machine; empty if there is none."""
    return shlex.split(os.environ.get("CC", "")) or ["cc"] * bool(shutil.which("cc"))


def compile_kernel(source: Path, target: Path) -> str:
    """Compile the kernel, with a checksum of its source; return the error, empty on success."""
    compiler = _compiler() or [sys.executable, *_ZIG, f"{platform.machine()}-linux-gnu.2.17"]
    checksum = f"-DSOURCE_CHECKSUM={zlib.crc32(source.read_bytes())}"
    command = [*compiler, *_FLAGS, checksum, str(source), "-o", str(target), "-lpthread"]
    try:
        # The compiler is that of the user who builds the package.
        done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    except OSError as error:
        return str(error)
    return done.stderr if done.returncode else ""


class BuildKernel(build_py):  # type: ignore[misc]
    """Copies the Python files of the package, and compiles the kernel next to its source."""

    def run(self) -> None:
        """Copy the files and compile the kernel; log a warning if the compilation fails."""
        super().run()
        folder = Path("hpctrain", "comm", "node")
        place = folder if self.editable_mode else self.build_lib / folder
        if refusal := compile_kernel(folder / "kernel.c", place / "libkernel.so"):
            _LOG.warning("hpctrain is built without its compiled kernel: %s", refusal)


class TaggedWheel(bdist_wheel):  # type: ignore[misc]
    """Tags the wheel for every Python version and, if built with the kernel, for one platform."""

    def finalize_options(self) -> None:
        """Declare that the wheel has compiled code, so that it is installed per platform."""
        self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, its ABI, and the platform."""
        has_kernel = any(Path(self.bdist_dir).rglob("libkernel.so"))
        return "py3", "none", super().get_tag()[2] if has_kernel else "any"
