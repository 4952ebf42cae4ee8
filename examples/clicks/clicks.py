"""Model and data of clicks.toml: a wide and deep network with sharded embeddings.

Source: Cheng et al. 2016, arXiv:1606.07792 (wide and deep).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpctrain import DataError, ShardedEmbedding
from hpctrain.comm import Communicator
from hpctrain.data import MANIFEST, ShardedDataset, write_arrays

FIELDS = 6
"""Number of ids per line of the log, such as user, ad and site; fields share no ids."""
EXPONENT = 1.2
"""The frequency of the k-th most frequent id of a field is about ``k ** -EXPONENT``."""


class WideAndDeep(nn.Module):
    """Sum of a linear model and a network over embeddings; returns logits."""

    def __init__(self, num_ids: int, dim: int, width: int, **cache: Any) -> None:
        super().__init__()
        self.wide = ShardedEmbedding(num_ids, 1, mode="sum", lr=0.05, init=0.0, **cache)
        self.deep = ShardedEmbedding(num_ids, dim, lr=0.05, seed=1, **cache)
        self.layers = nn.Sequential(nn.Linear(FIELDS * dim, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Return ``(n,)`` logits of a click for ``(n, FIELDS)`` ids."""
        logits: Tensor = self.wide(ids) + self.layers(self.deep(ids).flatten(1))
        return logits.squeeze(1)


def model(num_ids: int, dim: int = 16, width: int = 64, **cache: Any) -> WideAndDeep:
    """Return the network; ``cache_rows`` and ``cache_steps`` are passed to its tables."""
    torch.manual_seed(0)
    return WideAndDeep(num_ids, dim, width, **cache)


def data(
    comm: Communicator,
    folder: str,
    num_ids: int,
    num_train: int,
    num_validation: int,
    num_test: int,
) -> tuple[ShardedDataset, ...]:
    """Return training, validation and test log, which rank 0 writes in the first run.

    Collective.

    Args:
        comm: all ranks.
        folder: folder of the three data sets.
        num_ids: number of IDs of all fields together.
        num_train: lines for training.
        num_validation: lines for the tests during training.
        num_test: lines for the test at the end.
    """
    root, refusal = Path(folder), ""
    sizes = {"train": num_train, "validation": num_validation, "test": num_test}
    if comm.rank == 0:
        try:
            for seed, (split, num) in enumerate(sizes.items()):
                if not (root / split / MANIFEST).exists():
                    log = log_of(num, num_ids, seed)
                    write_arrays(root / split, log, samples_per_shard=16384, split=split)
        except (DataError, OSError) as error:
            refusal = f"cannot write the log: {error}"
    comm.agree(not refusal, refusal)
    return tuple(ShardedDataset.open(root / split, comm) for split in sizes)


def log_of(num: int, num_ids: int, seed: int) -> dict[str, NDArray[np.generic]]:
    """Return lines of a synthetic log: ids and clicks."""
    generator = np.random.default_rng(seed)
    of_field = num_ids // FIELDS
    uniform = generator.random((num, FIELDS))
    # The inverse of the distribution function of a power law between 1 and the number of ids.
    span = 1 - of_field ** (1 - EXPONENT)
    ranks = (1 - uniform * span) ** (1 / (1 - EXPONENT))
    ids = np.minimum(ranks.astype(np.int64), of_field - 1) + np.arange(FIELDS) * of_field
    logits = tastes(ids).sum(axis=1) - 1.5 + 1.5 * tastes(ids[:, 0] * 31 + ids[:, 1] % 7)
    clicks = generator.random(num) < 1 / (1 + np.exp(-logits))
    return {"ids": ids, "click": clicks.astype(np.float32)}


def tastes(ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return what each id adds to the logit: numbers around 0 that look random."""
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5) * 2
