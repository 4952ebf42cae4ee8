"""The order of an epoch, shared out among ranks whose number may change in the middle of it."""

import random
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import Sampler

from hpctrain.core.errors import ConfigError
from hpctrain.runtime import world


def epoch_order(num_samples: int, seed: int | None) -> list[int]:
    """Return all indices in the order of an epoch; a ``seed`` of None shuffles nothing."""
    order = list(range(num_samples))
    if seed is not None:
        random.Random(seed).shuffle(order)  # noqa: S311 - an order, no secret
    return order


def left_of(order: Sequence[int], num_done: int, done: Collection[int] = ()) -> list[int]:
    """Return what is left of an epoch once its first ``num_done`` and those in ``done`` went."""
    left = list(order[num_done:])
    return [index for index in left if index not in done] if done else left


def part_of(left: Sequence[int], rank: int, size: int, order: Sequence[int]) -> list[int]:
    """Return the indices of one rank: every ``size``-th, as many as any other rank gets.

    Where ``left`` cannot be divided, the last round is filled up from the beginning of the
    epoch's ``order``, so an epoch that was interrupted is filled up as one that was not. After k
    indices on every rank the first ``k * size`` of ``left`` are done: a count is all that must be
    remembered.
    """
    mine = list(left[rank::size])
    num_rounds = -(-len(left) // size)
    if len(mine) < num_rounds:
        mine.append(order[(rank + size * (num_rounds - 1) - len(left)) % len(order)])
    return mine


class ElasticSampler(Sampler[int]):
    """Shares a data set out among all ranks, and what is left of it among other ranks later.

    A ``TorchState`` that holds it keeps its place in the epoch: after ``restore()`` and
    ``sync()``, on the same or another number of ranks, every index that no commit has recorded is
    delivered, and no other one. All ranks get equally many, so the last round of an epoch
    repeats fewer than ``size`` indices where the data set cannot be divided. On as many ranks as
    before, the batches are those of an epoch that nothing interrupts.

    Call ``record_batch`` after each batch, and ``set_epoch`` at the end of each epoch, not at
    its beginning: a restored epoch would start anew. The order is Horovod's for the same seed.

    Source: Horovod 0.28, ``horovod.torch.elastic.ElasticSampler``.
    Differs: fewer indices than ranks may be left (Horovod fails); ``record_indices``.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:  # noqa: FBT001, FBT002 - Horovod's
        """Share out ``dataset``, whose length must not change. ``hpctrain.init()`` comes first.

        Args:
            dataset: what to share out.
            shuffle: whether each epoch has an order of its own.
            seed: of the order; the same on every rank.
        """
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, of which nothing is done."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 - Horovod's
        """Remember that every rank has done a batch of ``batch_size`` indices.

        Takes effect at the next ``reset()``. The number of the batch does not matter: batches are
        recorded one after the other.

        Raises:
            ConfigError: this epoch is recorded by ``record_indices``.
        """
        if self.processed_indices:
            raise ConfigError(
                f"an epoch is recorded by record_batch or by record_indices, not by both; epoch "
                f"{self.epoch} has {len(self.processed_indices)} recorded indices"
            )
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """Remember that this rank has done ``indices``, where batches are not all alike.

        Takes effect at the next ``reset()``; ``TorchState.sync()`` puts together what all ranks
        have recorded, and delivers again what only a rank that died has. Costs memory for each
        index; ``record_batch`` counts, and loses nothing.

        Raises:
            ConfigError: this epoch is recorded by ``record_batch``.
        """
        if self.processed_num:
            raise ConfigError(
                f"an epoch is recorded by record_batch or by record_indices, not by both; epoch "
                f"{self.epoch} has {self.processed_num} indices recorded by batches"
            )
        self.processed_indices.update(int(index) for index in indices)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch, in plain values."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": sorted(self.processed_indices),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the place in the epoch that ``state_dict()`` of any number of ranks tells."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Share out what is left of the epoch among the ranks of today."""
        self.rank, self.num_replicas = world.rank(), world.size()
        seed = self.seed + self.epoch if self.shuffle else None
        self._order = epoch_order(len(self.dataset), seed)
        self.remaining_indices = left_of(self._order, self.processed_num, self.processed_indices)
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(
            part_of(self.remaining_indices, self.rank, self.num_replicas, self._order),
        )

    def __len__(self) -> int:
        return self.num_samples
