"""A cluster for each worker of pytest, started by the first test that asks for it."""

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
    """Four nodes of four cores and two GPUs in which Slurm believes, all in service at first."""
    yield _cluster
    _cluster.restore()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A configuration of some two seconds of training, in a folder of its own."""
    return training.write(tmp_path)


@pytest.fixture
def login(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster, and this process on its login node, in an empty folder."""
    for name, text in slurm.environ.items():
        if os.environ.get(name) != text:
            monkeypatch.setenv(name, text)
    monkeypatch.chdir(tmp_path)
    return slurm
