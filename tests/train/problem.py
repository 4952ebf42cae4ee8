"""A small learning problem in float64, named by the configurations of this folder's tests."""

import contextlib
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.data.ragged import Ragged
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


class Noise(nn.Module):
    """Draws from every random generator that a process has."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale a little, while training."""
        if not self.training:
            return x
        drawn = random.random() + np.random.standard_normal()  # noqa: NPY002 - the global one
        return x * (1 + 0.01 * drawn) + 0.01 * torch.randn_like(x)


def noisy_model(width: int = 8, *, single: bool = False) -> nn.Sequential:
    """A network whose every step depends on random numbers and on each rank's own buffers."""
    network = nn.Sequential(Noise(), *model(width, dropout=0.3, norm=True))
    return network.to(torch.float32) if single else network


def data(
    comm, folder: str, *, single: bool = False, label_type: str = "<i8"
) -> tuple[ShardedDataset, ShardedDataset]:
    """The same samples to train and to test with, written once.

    Single ones have 24 bytes, so that batches begin at addresses of any kind.
    """
    if comm.rank == 0 and not Path(folder).exists():
        values = samples()
        values["x"] = values["x"].astype(np.float32 if single else np.float64)
        values["y"] = values["y"].astype(label_type)
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=Path(folder).parent) as aside:
            made = Path(aside) / "data"
            write_arrays(made, values, samples_per_shard=20)
            with contextlib.suppress(OSError):  # another job has been faster
                made.rename(folder)
    comm.barrier()
    dataset = ShardedDataset.open(folder, comm)
    return dataset, dataset


def ragged_data(comm, folder: str) -> tuple[ShardedDataset, ShardedDataset]:
    """Samples of different lengths."""
    if comm.rank == 0 and not Path(folder).exists():
        words = Ragged.of([torch.ones(length) for length in range(1, 9)])
        write_arrays(
            Path(folder), {"words": words, "y": np.zeros(8, np.int64)}, samples_per_shard=8
        )
    comm.barrier()
    dataset = ShardedDataset.open(folder, comm)
    return dataset, dataset


def unchanged(columns):
    """A transform that changes nothing."""
    return columns


def renamed(columns):
    """A transform that makes the field that the model takes."""
    return {"image": columns["x"] * 2, "y": columns["y"]}


def renamed_for_test(columns):
    """Another one."""
    return {"image": columns["x"], "y": columns["y"]}


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
