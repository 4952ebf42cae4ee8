"""Read and transform the next batches of a rank in threads or processes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeVar

from hpctrain.core.lazy import imported
from hpctrain.core.python_compat import collection
from hpctrain.data.data_config import WORKER_TIMEOUT_S
from hpctrain.data.samples import Batch, Columns, Indices, Ragged, Samples, Values
from hpctrain.data.steps import Division, Skipped, Steps
from hpctrain.data.transform import ThreadDraws, Transform, apply

if TYPE_CHECKING:
    from hpctrain.data.workers.pool import DecodePool

T = TypeVar("T")
_COLLECTION = collection()


@dataclass(kw_only=True)
class Reading(Division):
    """The data set of a loader, its transform, and options for reading batches ahead."""

    dataset: Samples = field(kw_only=False)  # identical on every rank
    transform: Transform | None = None
    """Function applied to each batch after the batch is read. To transform single samples, or to
    get a random generator for each sample, pass a ``PerSample``. A transform that runs in threads
    must not draw from the global generators."""
    threads: int = 4  # number of steps that are read concurrently
    prefetch: int = 4  # batches read ahead; with ``workers``, at least two per worker
    workers: int = 0  # processes that read and transform, for transforms that hold the GIL
    worker_timeout_s: float = WORKER_TIMEOUT_S
    """Time limit of a worker for a batch; ``inf`` for no limit. A worker that exceeds the limit is
    ended, and the error names the samples of its batch. Choose a limit below ``HPCTRAIN_TIMEOUT``,
    after which the other ranks fail."""
    pin_memory: bool = False  # whether batches are in pinned memory, which a GPU copies faster
    ragged: Literal["packed", "padded"] = "packed"
    """Form of ragged fields: ``packed`` gives a ``Ragged``, ``padded`` a tensor padded with zeros
    and a second field ``<field>_lengths``."""
    _draws: ThreadDraws = field(default_factory=ThreadDraws, init=False, repr=False)
    _pool: "DecodePool | None" = field(default=None, init=False, repr=False)

    def close(self) -> None:
        """End the worker processes, if there are any; the next epoch starts new ones."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def reading(
        self, steps: Steps, skipped: Skipped, epoch: int, seed: int
    ) -> AbstractContextManager[Iterator[Batch | Exception]]:
        """Return a context manager that yields an iterator over the batches of ``steps``.

        The batches are read ahead. An item of the iterator is a batch, or the error that occurred
        while the batch was read.
        """
        if self.workers and self._pool is None:
            self._pool = imported("hpctrain.data.workers.pool:DecodePool")(
                self.dataset,
                self.transform,
                self.workers,
                self.worker_timeout_s,
                any_ranks=self.micro_shards is not None,
            )
        threads, depth, in_memory = self.threads, self.prefetch, self.dataset.in_memory
        if self.workers:
            # Each thread waits for one batch of a worker. With two threads per worker, a worker
            # that has finished a batch finds its next request.
            threads = depth = max(self.prefetch, 2 * self.workers)
        elif in_memory and not (self.transform or self.pin_memory):
            depth = 0  # a copy in memory takes less time than a call in a thread

        def read(number: int) -> Batch | Exception:
            try:
                if not in_memory:
                    with suppress(Exception):  # ``take`` will raise an error that persists
                        if (soon := steps.soon(number)).size:
                            self.dataset.will_need(soon)
                indices = skipped.without(steps.samples(number))
                return self._batch(self._columns(indices, epoch, seed), len(indices))
            except Exception as error:  # the loader raises it at the step of this batch
                return error

        return prefetched(read, range(len(steps)), threads=threads, depth=depth)

    def _columns(self, indices: Indices, epoch: int, seed: int) -> Columns:
        if self._pool is not None:
            return self._pool.take(indices, epoch, seed)
        columns = self.dataset.take(indices)
        with self._draws.watched() if self.transform else nullcontext():
            return apply(self.transform, columns, indices, epoch, seed)

    def _batch(self, fields: Mapping[str, Values], num_samples: int) -> Batch:
        if self.ragged == "padded":
            fields = _padded(fields)
        if self.pin_memory:
            fields = {name: values.pin_memory() for name, values in fields.items()}
        return Batch(fields, num_samples)


def _padded(fields: Mapping[str, Values]) -> Columns:
    """Pad ragged fields to the longest sample of the batch, and add ``<field>_lengths``."""
    result: Columns = {}
    for name, values in fields.items():
        if isinstance(values, Ragged):
            result[name] = values.padded()
            result[f"{name}_lengths"] = values.lengths
        else:
            result[name] = values
    return result


@contextmanager
def prefetched(
    work: Callable[[int], T], numbers: Iterable[int], *, threads: int, depth: int
) -> Iterator[Iterator[T]]:
    """Yield an iterator over ``work(number)``, in order, computed at most ``depth`` items ahead.

    With ``depth`` 0 the caller's thread calls ``work``. At the end of the block, also after an
    exception, calls that have started are completed, all other calls are cancelled, and all
    threads end. If the garbage collector ends the block, the threads are not awaited.
    """
    if not depth:
        yield map(work, numbers)
        return
    pool = ThreadPoolExecutor(min(threads, depth), thread_name_prefix="hpctrain-loader")
    pending = (pool.submit(work, number) for number in numbers)
    try:
        yield _in_order(pending, depth)
    finally:
        pool.shutdown(wait=not _COLLECTION.is_running, cancel_futures=True)


def _in_order(pending: Iterator[Future[T]], depth: int) -> Iterator[T]:
    ahead = deque(islice(pending, depth))
    while ahead:
        # Keep no reference, so that the memory is free as soon as the consumer drops the item.
        given = [ahead.popleft().result()]
        ahead.extend(islice(pending, 1))
        yield given.pop()
