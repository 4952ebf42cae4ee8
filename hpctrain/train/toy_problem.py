"""Synthetic problem of a new configuration; the user replaces it with a real problem.

A network classifies points in the plane: it predicts from which arm of a spiral a point is drawn.
"""

import math
from pathlib import Path

import numpy as np
from torch import nn

from hpctrain.comm.agreement import on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.data.data_config import DataConfig
from hpctrain.data.format.dataset_manifest import MANIFEST
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.writer import write_arrays
from hpctrain.optim.optimizer_config import OptimizerConfig
from hpctrain.train.run_config import ModelConfig, RunConfig

NUM_ARMS = 3
NUM_POINTS = {"train": 2000, "test": 500}


def config() -> RunConfig:
    """Return the default configuration with this problem."""
    here = "hpctrain.train.toy_problem"
    return RunConfig(
        model=ModelConfig(target=f"{here}:model"),
        data=DataConfig(target=f"{here}:data", args={"folder": "runs/spiral-data"}),
        optimizer=OptimizerConfig(name="Adam", lr=0.01),
    )


def model(width: int = 64) -> nn.Sequential:
    """Return a network from coordinates ``(n, 2)`` to scores ``(n, 3)``."""
    return nn.Sequential(
        nn.Linear(2, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, NUM_ARMS),
    )


def data(comm: Communicator, folder: str) -> tuple[ShardedDataset, ShardedDataset]:
    """Open the training and test points; rank 0 writes missing files. Collective.

    Args:
        comm: all ranks.
        folder: folder on a file system that all ranks share.

    Raises:
        HpctrainError: the files cannot be written or read; on all ranks.
    """
    root = Path(folder)
    on_root(comm, lambda: _write(root))
    return ShardedDataset.open(root / "train", comm), ShardedDataset.open(root / "test", comm)


def points(num: int, seed: int) -> dict[str, np.ndarray]:
    """Return random points: coordinates ``x``, ``(num, 2)`` in float32, and arm indices ``y``."""
    random = np.random.default_rng(seed)
    arm = random.integers(NUM_ARMS, size=num)
    radius = np.sqrt(random.uniform(size=num))  # uniform density per area
    angle = 2 * math.pi * (arm / NUM_ARMS + radius) + random.normal(scale=0.2, size=num)
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return {"x": x.astype(np.float32), "y": arm}


def _write(root: Path) -> None:
    for seed, (split, num) in enumerate(NUM_POINTS.items()):
        if not (root / split / MANIFEST).exists():
            write_arrays(root / split, points(num, seed), samples_per_shard=1000)
