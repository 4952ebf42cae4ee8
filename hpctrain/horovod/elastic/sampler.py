"""``ElasticSampler``, which divides an epoch among ranks whose number may change."""

import random
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import Sampler

from hpctrain.core.errors import ConfigError
from hpctrain.runtime import world


def epoch_order(num_samples: int, seed: int | None) -> list[int]:
    """Return all sample indices in the order of an epoch; not shuffled if ``seed`` is None."""
    order = list(range(num_samples))
    if seed is not None:
        random.Random(seed).shuffle(order)  # noqa: S311 - an order, no secret
    return order


def left_of(order: Sequence[int], num_done: int, done: Collection[int] = ()) -> list[int]:
    """Return the indices in ``order``, except the first ``num_done`` and all in ``done``."""
    left = list(order[num_done:])
    return [index for index in left if index not in done] if done else left


def part_of(left: Sequence[int], rank: int, size: int, order: Sequence[int]) -> list[int]:
    """Return every ``size``-th entry of ``left``, from entry ``rank`` on.

    All ranks get the same number of entries: if ``size`` does not divide the length of ``left``,
    the last round is padded from the start of the epoch's ``order``, so that interrupted and
    uninterrupted epochs have the same padding. After k entries on every rank, the first
    ``k * size`` entries of ``left`` are done, so a count is sufficient as state.
    """
    mine = list(left[rank::size])
    num_rounds = -(-len(left) // size)
    if len(mine) < num_rounds:
        mine.append(order[(rank + size * (num_rounds - 1) - len(left)) % len(order)])
    return mine


class ElasticSampler(Sampler[int]):
    """Sampler that divides an epoch among all ranks, also if their number changes.

    A ``TorchState`` that contains the sampler saves the sampler's position in the epoch. After
    ``restore()`` and ``sync()``, on the same or another number of ranks, the sampler returns each
    index that no commit has recorded. All ranks get the same number of indices, so the last round
    of an epoch repeats fewer than ``size`` indices if ``size`` does not divide the data set. On
    the same number of ranks, the batches are the same as in an uninterrupted epoch.

    Call ``hpctrain.init()`` before construction, ``record_batch`` after each batch, and
    ``set_epoch`` at the end of each epoch. If a program called ``set_epoch`` at the beginning, a
    restored epoch would start from its first index. For the same seed, the order is the same as in
    Horovod.

    Args:
        dataset: data set of constant length.
        shuffle: whether each epoch has a different random order.
        seed: seed of the order; the same on every rank.

    Source: Horovod 0.28, ``horovod.torch.elastic.ElasticSampler``.
    Differs: the rest of an epoch may have fewer indices than there are ranks, whereas Horovod
    fails; Horovod has no ``record_indices``.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:  # noqa: FBT001, FBT002 - Horovod's
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self._move_to(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch ``epoch`` at its first index. Local."""
        self._move_to(epoch)

    def _move_to(self, epoch: int, num: int = 0, indices: Iterable[int] = ()) -> None:
        self.epoch = epoch
        self.processed_num = num
        self.processed_indices = set(indices)
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 - Horovod's
        """Record that every rank has processed a batch. Local.

        Takes effect at the next ``reset()``.

        Args:
            batch_idx: ignored, as batches are recorded in order.
            batch_size: number of indices of the batch on each rank.

        Raises:
            ConfigError: this epoch is recorded by ``record_indices``.
        """
        if self.processed_indices:
            raise ConfigError(
                f"an epoch must be recorded by record_batch or record_indices, not by both, but "
                f"epoch {self.epoch} has {len(self.processed_indices)} recorded indices; call "
                f"record_indices in this epoch"
            )
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank has processed ``indices``. Local.

        Use this method if batch sizes differ between ranks. The record takes effect at the next
        ``reset()``. ``TorchState.sync()`` merges the records of all ranks; indices that only a
        lost rank has recorded are sampled again. This method stores each index, whereas
        ``record_batch`` stores one count.

        Raises:
            ConfigError: this epoch is recorded by ``record_batch``.
        """
        if self.processed_num:
            raise ConfigError(
                f"an epoch must be recorded by record_batch or record_indices, not by both, but "
                f"epoch {self.epoch} has {self.processed_num} indices recorded by batches; call "
                f"record_batch in this epoch"
            )
        self.processed_indices.update(int(index) for index in indices)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch as picklable values. Local."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": sorted(self.processed_indices),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a position in the epoch that was saved on any number of ranks. Local."""
        indices = state_dict.get("processed_indices", ())
        self._move_to(state_dict["epoch"], state_dict["processed_num"], indices)

    def reset(self) -> None:
        """Divide the rest of the epoch among the current ranks. Local."""
        self.rank, self.num_replicas = world.rank(), world.size()
        seed = self.seed + self.epoch if self.shuffle else None
        self._order = epoch_order(len(self.dataset), seed)
        self.remaining_indices = left_of(self._order, self.processed_num, self.processed_indices)
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(part_of(self.remaining_indices, self.rank, self.num_replicas, self._order))

    def __len__(self) -> int:
        return self.num_samples
