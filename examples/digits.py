"""Model and data of digits.toml: a small network, and scikit-learn's digits."""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hpctrain import DataError
from hpctrain.comm import Communicator
from hpctrain.data import MANIFEST, ShardedDataset, write_arrays

NUM_TEST, NUM_VALIDATION = 360, 144
"""Numbers of test and validation samples; the other 1293 digits are for training."""

SPLITS = ("train", "validation", "test")


class Network(nn.Module):
    """Two convolutions, then two linear layers."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(32 * width, 64),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(64, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Turn ``(n, 8, 8)`` bytes from 0 to 16 into ``(n, 10)`` scores."""
        scores: Tensor = self.layers(x.float().unsqueeze(1) / 16)
        return scores


def model(width: int = 16, dropout: float = 0.25) -> Network:
    """Make the network; ``width`` counts the channels of its first layer."""
    return Network(width, dropout)


def data(comm: Communicator, folder: str) -> tuple[ShardedDataset, ...]:
    """Return training, validation and test digits, which rank 0 packs in the first run.

    Collective. Tests during training use the validation digits, the test at the end uses the
    test digits.
    """
    root = Path(folder)
    refusal = _pack(root) if comm.rank == 0 else None
    comm.agree(refusal is None, refusal or "")
    return tuple(ShardedDataset.open(root / split, comm) for split in SPLITS)


def _pack(root: Path) -> str | None:
    """Write missing data sets; return a message if that fails."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    try:
        parts = np.split(order, [NUM_TEST, NUM_TEST + NUM_VALIDATION])
        for split, rows in zip(reversed(SPLITS), parts, strict=True):
            if not (root / split / MANIFEST).exists():
                arrays = {
                    "x": digits.images[rows].astype(np.uint8),
                    "y": digits.target[rows].astype(np.int64),
                }
                write_arrays(root / split, arrays, samples_per_shard=400, split=split)
    except DataError as error:
        return str(error)
    return None
