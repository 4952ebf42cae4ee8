"""Data sets for ``torch.utils.data.DataLoader``, with whole batches instead of single samples."""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from hpctrain.data.loader import Loader
from hpctrain.data.order.ordering import OrderName
from hpctrain.data.samples import Columns, Picked, Samples
from hpctrain.data.steps import Tail
from hpctrain.data.transform import Transform


def collate(samples: Sequence[Any]) -> Any:
    """Return the batch that a data set picked as it is: ``DataLoader(collate_fn=collate)``.

    Args:
        samples: from ``ShardedDataset.__getitems__``; any others go to ``default_collate``.
    """
    return samples.fields if isinstance(samples, Picked) else default_collate(list(samples))


@dataclass(eq=False)
class Stream(IterableDataset[Columns]):
    """The batches of a ``Loader`` for ``DataLoader(stream, batch_size=None, num_workers=k)``.

    The same batches in the same order, for any number of workers; each reads every k-th step.
    Slower than ``Loader``, whose threads need not send batches from process to process.
    """

    dataset: Samples  # what to read; the same on every rank
    _: KW_ONLY
    global_batch: int  # samples per step, of all ranks together
    rank: int = 0  # rank of this process
    size: int = 1  # number of ranks
    seed: int = 0  # of the order of every epoch; the same on every rank
    epoch: int = 0  # the epoch of the next pass: set it before
    order: OrderName = "auto"  # as of ``Loader``
    tail: Tail = "short"  # as of ``Loader``
    transform: Transform | None = None  # as of ``Loader``

    def __post_init__(self) -> None:
        """Check the arguments."""
        self._loader = Loader(
            self.dataset,
            global_batch=self.global_batch,
            rank=self.rank,
            size=self.size,
            order=self.order,
            tail=self.tail,
            transform=self.transform,
        )

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on every rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Columns]:
        """Yield the batches of this rank, in a worker of ``DataLoader`` its share of them."""
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        self._loader.seed, self._loader.epoch = self.seed, self.epoch
        steps = self._loader.steps(num_ahead=stride)
        for step in range(first, len(steps), stride):
            (batch,) = self._loader.read(steps, None, step)
            if isinstance(batch, Exception):
                raise batch
            yield dict(batch.fields)
