"""A small learning problem in float64, named by the configurations of this folder's tests."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.data.reader import ShardedDataset
from hpctrain.data.writer import write_arrays
from hpctrain.errors import DataError

NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES = 53, 6, 3


def samples() -> dict[str, np.ndarray]:
    """Points, and the class that each belongs to."""
    random = np.random.default_rng(0)
    x = random.standard_normal((NUM_SAMPLES, NUM_FEATURES))
    return {"x": x, "y": np.argmax(x[:, :NUM_CLASSES], axis=1)}


def model(width: int = 8, *, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    """A network of two layers, perhaps with buffers."""
    layers = [
        nn.BatchNorm1d(NUM_FEATURES) if norm else nn.Identity(),
        nn.Linear(NUM_FEATURES, width),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(width, NUM_CLASSES),
    ]
    return nn.Sequential(*layers).to(torch.float64)


def data(comm, folder: str) -> tuple[ShardedDataset, ShardedDataset]:
    """The same samples to train and to test with."""
    if comm.rank == 0:
        write_arrays(Path(folder), samples(), samples_per_shard=20)
    comm.barrier()
    dataset = ShardedDataset.open(folder, comm)
    return dataset, dataset


def distance(output: Tensor, label: Tensor) -> Tensor:
    """A metric with one value per sample."""
    return output.gather(1, label[:, None])[:, 0].abs()


def no_model() -> int:
    """What no target may return."""
    return 3


def no_data(comm):
    """What no target may return."""
    return comm


def broken_data(comm) -> None:
    """Fail on the last rank alone."""
    if comm.rank == comm.size - 1:
        raise DataError("the disk of this rank is gone")
