"""Provide data sets whose samples contain their own number."""

from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hpctrain.comm.communicator import Communicator
from hpctrain.core.config import Settings
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.writer import write_arrays
from tests.comm.conftest import connected


def numbered(num_samples: int) -> dict[str, NDArray[Any]]:
    """Make samples: ``number`` counts them, ``image`` repeats the number in its last element."""
    image = np.random.default_rng(num_samples).random((num_samples, 3, 2), dtype=np.float32)
    image[:, -1, -1] = np.arange(num_samples)
    return {"image": image, "number": np.arange(num_samples)}


@pytest.fixture(scope="session")
def dataset_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ShardedDataset]:
    """Return a data set of numbered samples in several shards, written once."""

    @cache
    def make(num_samples: int) -> ShardedDataset:
        directory = tmp_path_factory.mktemp("set") / str(num_samples)
        write_arrays(directory, numbered(num_samples), samples_per_shard=1 + num_samples // 3)
        return ShardedDataset(directory)

    return make


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a data set of 100 numbered samples in three shards, to be damaged."""
    write_arrays(tmp_path / "set", numbered(100), samples_per_shard=40, block_size=7)
    return tmp_path / "set"


@pytest.fixture(scope="module")
def comm() -> Generator[Communicator]:
    """Return the communicator of all ranks of the session."""
    with connected(Settings(probe="off")) as connection:
        yield connection.comm


@pytest.fixture
def folder(comm: Communicator, tmp_path: Path) -> Path:
    """Return a directory that does not exist yet, the same on all ranks."""
    return comm.broadcast_object(tmp_path) / "set"
