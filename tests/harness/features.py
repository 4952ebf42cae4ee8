"""Features a machine may lack: what ``@pytest.mark.requires`` may name."""

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cluster.libraries import family
from hpctrain.errors import LaunchError
from hpctrain.launch.horovod.installed import installed
from hpctrain.launch.pmi import libmpi
from tests.cluster.slurm import check as slurm
from tests.cluster.vcluster.check import obstacle

ROOT = Path(__file__).parents[2]


def _mpich() -> str:
    if (ROOT / ".venv-mpich/bin/mpiexec").exists():
        return ""
    return "no MPICH: `make .venv-mpich` installs it"


def _root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


@functools.cache
def _cluster() -> str:
    """Virtual nodes on one machine."""
    return obstacle()


@functools.cache
def _slurm() -> str:
    """A private Slurm on virtual nodes."""
    return slurm.obstacle("uts")


@functools.cache
def _slurm_accounting() -> str:
    """The same with a data base, for ``sacct``."""
    return slurm.obstacle("uts", accounting=True)


def _debian_openmpi() -> str:
    """The MPI that Debian has, of another major version than the one in ``.venv``."""
    if any(Path("/usr/lib").glob("*-linux-gnu/libmpi.so.40")) and Path("/usr/bin/mpirun").exists():
        return ""
    return "no Open MPI of Debian: apt-get install openmpi-bin"


@functools.cache
def _horovod() -> str:
    """Horovod itself, of a wheel for the MPI that the tests run with."""
    found = installed()
    if found is None or not found.needs:
        return "no Horovod: `make .venv-horovod` builds it"
    try:
        library = libmpi()
    except LaunchError as error:
        return str(error)
    if found.family != family(library):
        return f"Horovod was built for {found.needs}, these tests run with {library.name}"
    return ""


def _h5dump() -> str:
    return "" if shutil.which("h5dump") else "h5dump of hdf5-tools is not installed"


def _compiler() -> str:
    return "" if shutil.which("cc") else "no C compiler: cc"


FEATURES: dict[str, Callable[[], str]] = {
    "cluster": _cluster,
    "compiler": _compiler,
    "debian-openmpi": _debian_openmpi,
    "h5dump": _h5dump,
    "horovod": _horovod,
    "mpich": _mpich,
    "root": _root,
    "slurm": _slurm,
    "slurm-accounting": _slurm_accounting,
}
"""For each feature, what is missing; empty where it is there."""


def required() -> set[str]:
    """Features that HPCTRAIN_REQUIRE names: a test that lacks one of them fails."""
    names = {name for name in os.environ.get("HPCTRAIN_REQUIRE", "").split(",") if name}
    if unknown := names - FEATURES.keys():
        raise pytest.UsageError(
            f"HPCTRAIN_REQUIRE names {', '.join(sorted(unknown))}, known are {', '.join(FEATURES)}"
        )
    return names


def check(item: pytest.Item) -> None:
    """Skip a test whose features are missing here, or fail it where they are required."""
    mark = item.get_closest_marker("requires")
    for name in mark.args if mark else ():
        missing = FEATURES[name]()
        if missing and name in required():
            pytest.fail(f"HPCTRAIN_REQUIRE={name}: {missing}", pytrace=False)
        if missing:
            pytest.skip(missing)
