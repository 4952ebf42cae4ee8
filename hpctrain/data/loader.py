"""Batches of an epoch: one line of samples, cut into global batches, cut among the ranks."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice

import numpy as np
from torch import Tensor

from hpctrain.data.order import Order, Sequential, global_order
from hpctrain.data.reader import ShardedDataset
from hpctrain.errors import DataError

Transform = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]

TAILS = ("short", "drop")
"""What becomes of the samples after the last full global batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The share of one rank in a global batch: ``x, y = batch``, ``batch.x`` or ``batch["x"]``."""

    fields: Mapping[str, Tensor]
    """Tensors by name, in the order of the data set or of what the transform returned."""
    num_samples: int
    """Samples of this rank; 0 where a short tail does not go round."""

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the tensors."""
        return iter(self.fields.values())

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of a field."""
        return self.fields[name]

    def __getattr__(self, name: str) -> Tensor:
        """Return the tensor of a field."""
        # While a batch is unpickled it has no fields yet, and this must not ask for them.
        if name != "fields" and name in self.fields:
            return self.fields[name]
        raise AttributeError(f"a batch has no field {name!r}")


@dataclass(slots=True)
class Loader:
    """Iterates over the batches of one epoch, read ahead by one thread.

    The samples of step ``k`` are the same set for any number of ranks: those at the positions
    ``[k * global_batch, (k + 1) * global_batch)`` of the order of the epoch. Each rank gets a
    contiguous part of them, and every rank runs the same number of steps. Whatever goes wrong
    while reading is raised at the step that it belongs to.

    A complete pass moves on to the next epoch; ``set_epoch`` chooses another.
    """

    dataset: ShardedDataset
    """What to read; the same data set on every rank."""
    _: KW_ONLY
    global_batch: int
    """Samples per step, of all ranks together."""
    rank: int
    """Rank of this process."""
    size: int
    """Number of ranks."""
    seed: int = 0
    """Of the order of every epoch; the same on every rank."""
    shuffle: bool = True
    """Whether samples come in random order, another one in each epoch, or as they lie on disk."""
    tail: str = "short"
    """The last samples make a ``short`` step, or are left out: ``drop``."""
    transform: Transform | None = None
    """Makes the tensors of a batch from those of the data set, by name; runs while reading."""
    prefetch: int = 2
    """Batches read ahead."""
    epoch: int = field(default=0, init=False)
    """The epoch that the next pass goes through."""

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.global_batch < 1 or self.prefetch < 1:
            raise DataError(
                f"global_batch and prefetch must be positive, "
                f"got {self.global_batch} and {self.prefetch}"
            )
        if not 0 <= self.rank < self.size:
            raise DataError(f"rank must be in [0, size), got rank {self.rank} of {self.size}")
        if self.tail not in TAILS:
            raise DataError(f"tail must be one of {', '.join(TAILS)}, got {self.tail!r}")
        if not len(self):
            raise DataError(
                f"tail='drop' leaves no step: {len(self.dataset)} samples are fewer than the "
                f"global batch of {self.global_batch}; use tail='short' or a smaller batch"
            )

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on every rank."""
        full, rest = divmod(len(self.dataset), self.global_batch)
        return full + (rest > 0 and self.tail == "short")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, the same on every rank."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this rank, one for each step."""
        epoch = self.epoch
        order = self._order(epoch)
        pool = ThreadPoolExecutor(1, thread_name_prefix="hpctrain-loader")
        pending = (pool.submit(self._read, order, step) for step in range(len(self)))
        ahead: deque[Future[Batch]] = deque(islice(pending, self.prefetch))
        try:
            while ahead:
                batch = ahead.popleft().result()
                ahead.extend(islice(pending, 1))
                yield batch
        finally:
            # Also when the consumer leaves early: at most the batch in work is waited for.
            pool.shutdown(cancel_futures=True)
        self.epoch = epoch + 1

    def _order(self, epoch: int) -> Order:
        if self.shuffle:
            return global_order(len(self.dataset), self.seed, epoch)
        return Sequential()

    def _read(self, order: Order, step: int) -> Batch:
        start = step * self.global_batch
        stop = min(start + self.global_batch, len(self.dataset))
        mine = share(start, stop, self.rank, self.size)
        fields = self.dataset.take(order.samples_at(np.arange(mine.start, mine.stop)))
        return Batch(self.transform(fields) if self.transform else fields, len(mine))


def share(start: int, stop: int, rank: int, size: int) -> range:
    """Return a rank's part of ``[start, stop)``: contiguous, all parts equal or one apart."""
    total = stop - start
    return range(start + total * rank // size, start + total * (rank + 1) // size)
