"""A Slurm cluster for each worker of pytest, started by the first test that uses it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import SlurmCluster
from tests.slurm import training


@pytest.fixture(scope="session")
def _cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(gpus=2) as cluster:
        yield cluster


@pytest.fixture
def slurm(_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """Simulated cluster of four nodes with four cores and two GPUs each, all in service."""
    yield _cluster
    _cluster.restore()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Configuration of a training of about two seconds, in its own folder."""
    return training.write(tmp_path)


@pytest.fixture
def login(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster, with this process in an empty folder on its login node."""
    for name, text in slurm.environ.items():
        if os.environ.get(name) != text:
            monkeypatch.setenv(name, text)
    monkeypatch.chdir(tmp_path)
    return slurm
