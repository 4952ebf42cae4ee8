"""Build backend of the package: setuptools, which also compiles ``kernel.c``.

The library calls no Python, so one wheel serves every version of Python. The variable ``CC``
selects the compiler; the default is ``cc``. On a machine without ``cc``, pip installs the package
``ziglang``, which contains a compiler, for the build. Without the library, hpctrain runs slower
Python code.

A wheel for other machines is compiled by ``ziglang`` against the C library of its tag:

    pip wheel --no-deps -C--build-option=--plat-name=manylinux_2_17_aarch64 .
"""

import logging
import os
import platform
import re
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
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")
_LOG = logging.getLogger(__name__)


def get_requires_for_build_wheel(settings: Any = None) -> list[str]:
    """Return the packages that a build requires in addition to setuptools."""
    found: list[str] = build_meta.get_requires_for_build_wheel(settings)
    tag = _MANYLINUX.search(str(settings))
    return [*found, "ziglang"] if _compiler(tag[0] if tag else "")[0] == sys.executable else found


get_requires_for_build_editable = get_requires_for_build_wheel


def _compiler(tag: str) -> list[str]:
    """Return the command of the C compiler for a platform tag, by default of this machine."""
    local = shlex.split(os.environ.get("CC", "")) or ["cc"] * bool(shutil.which("cc"))
    portable = _MANYLINUX.fullmatch(tag)
    if local and not portable:
        return local
    major, minor, machine = portable.groups() if portable else ("2", "17", platform.machine())
    return [
        *(sys.executable, "-m", "ziglang", "cc"),
        *("-target", f"{machine}-linux-gnu.{major}.{minor}"),
    ]


def compile_kernel(source: Path, target: Path, tag: str = "") -> str:
    """Compile the kernel, with a checksum of its source; return the error, empty on success."""
    checksum = f"-DSOURCE_CHECKSUM={zlib.crc32(source.read_bytes())}"
    command = [*_compiler(tag), *_FLAGS, checksum, str(source), "-o", str(target), "-lpthread"]
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
        tag = self.get_finalized_command("bdist_wheel").plat_name
        if refusal := compile_kernel(folder / "kernel.c", place / "libkernel.so", tag):
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
