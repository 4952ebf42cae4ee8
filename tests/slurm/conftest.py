"""A cluster for each worker of pytest, started by the first test that asks for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import SlurmCluster
from tests.slurm import training


@pytest.fixture(scope="session")
def _clusters() -> list[SlurmCluster]:
    return []


@pytest.fixture(scope="session")
def slurm(_clusters: list[SlurmCluster]) -> Iterator[SlurmCluster]:
    """Four nodes of four cores, all of them in service when a test begins."""
    with SlurmCluster() as cluster:
        _clusters.append(cluster)
        yield cluster


@pytest.fixture(scope="session")
def slurm_gpus(_clusters: list[SlurmCluster]) -> Iterator[SlurmCluster]:
    """The same, with two GPUs in each node that Slurm believes in."""
    with SlurmCluster(gpus=2) as cluster:
        _clusters.append(cluster)
        yield cluster


@pytest.fixture(autouse=True)
def _in_service(_clusters: list[SlurmCluster]) -> Iterator[None]:
    """Bring the nodes back that a test took out of service."""
    yield
    for cluster in _clusters:
        cluster.restore()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A configuration of some two seconds of training, in a folder of its own."""
    return training.write(tmp_path)
