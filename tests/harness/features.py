"""Features a machine may lack: what ``@pytest.mark.requires`` may name."""

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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


def _slurm() -> str:
    return "" if shutil.which("sbatch") else "no sbatch on PATH"


def _h5dump() -> str:
    return "" if shutil.which("h5dump") else "h5dump of hdf5-tools is not installed"


FEATURES: dict[str, Callable[[], str]] = {
    "cluster": _cluster,
    "h5dump": _h5dump,
    "mpich": _mpich,
    "root": _root,
    "slurm": _slurm,
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
