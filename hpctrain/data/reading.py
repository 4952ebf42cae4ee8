"""Reading and transforming the batches of a rank ahead of their use, by threads or processes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import torch

from hpctrain.core.lazy import imported
from hpctrain.core.units import MIB
from hpctrain.data.data_config import WORKER_TIMEOUT_S
from hpctrain.data.samples import Batch, Columns, Ragged, Samples, Values
from hpctrain.data.steps import Division, Skipped, StepPart, Steps
from hpctrain.data.transform import ThreadDraws, Transform, apply

if TYPE_CHECKING:
    from hpctrain.data.workers.pool import DecodePool

T = TypeVar("T")
_ColumnsOf = Callable[[StepPart], Columns]

_PART_BYTES = 8 * MIB
_PART_BYTES_OF_THREAD = 16 * MIB
_MAX_TOGETHER = 128


@dataclass(kw_only=True)
class Reading(Division):
    """The data set of a loader, and how its batches are read and made."""

    dataset: Samples = field(kw_only=False)  # what to read; the same on every rank
    transform: Transform | None = None
    """Makes the values of a batch from those of the data set while reading. ``PerSample``
    makes one of a function of a sample, which may take a random generator: in threads the global
    ones are refused."""
    threads: int = 4  # how many steps are read at the same time
    prefetch: int = 4  # batches read ahead; more for more ``workers``
    workers: int = 0  # processes that read and transform, for a transform that holds Python's lock
    worker_timeout_s: float = WORKER_TIMEOUT_S
    """How long a worker may take for a batch, ``inf`` for no limit. One that takes longer is
    ended, and the error names what it was doing. Less than ``HPCTRAIN_TIMEOUT``, after which the
    other ranks fail."""
    pin_memory: bool = False  # whether batches are in pinned memory, which a GPU copies faster
    ragged: Literal["packed", "padded"] = "packed"
    """Samples of different lengths come as ``Ragged``, or as a tensor filled up with zeros and a
    field ``<field>_lengths``."""
    _draws: ThreadDraws = field(default_factory=ThreadDraws, init=False, repr=False)
    _pool: "DecodePool | None" = field(default=None, init=False, repr=False)

    def close(self) -> None:
        """End the worker processes, if there are any; the next pass starts new ones."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def read_depth(self) -> "ReadDepth":
        """Return how much is read at once, and how much ahead."""
        return ReadDepth.of(
            self.dataset.sample_bytes * self.global_batch / self.size,
            threads=self.threads,
            prefetch=self.prefetch,
            workers=self.workers,
            is_copy=self.dataset.in_memory and not (self.transform or self.pin_memory),
            has_transform=self.transform is not None,
        )

    def reading(
        self, steps: Steps, depth: "ReadDepth", skipped: Skipped, epoch: int, seed: int
    ) -> AbstractContextManager[Iterator[list[Batch | Exception]]]:
        """Begin to read the parts of ``steps`` ahead: their batches, or what prevents them."""
        if self.workers and self._pool is None:
            self._pool = imported("hpctrain.data.workers.pool:DecodePool")(
                self.dataset,
                self.transform,
                self.workers,
                self.worker_timeout_s,
                any_ranks=self.micro_shards is not None,
            )
        columns_of = partial(self._columns, self._pool, epoch, seed)
        read = partial(self._read, steps, skipped, columns_of)
        return prefetched(read, range(len(steps)), threads=depth.threads, depth=depth.depth)

    def _read(
        self,
        steps: Steps,
        skipped: Skipped,
        columns_of: Callable[[StepPart], Columns],
        number: int,
    ) -> list[Batch | Exception]:
        """Return the batch of each step of a part, or what prevents it. Threads may call it."""
        part = steps.part(number)
        if not self.dataset.in_memory:
            with suppress(Exception):  # raised at the step that cannot be read
                if (soon := steps.soon(number)).size:
                    self.dataset.will_need(soon)
        if len(skipped):
            part = part.without(skipped)
        if len(part.sizes) > 1:
            assert self.transform is None  # a thread for each step would run it
            with suppress(Exception):
                columns = cut_apart(self.dataset.take(part.indices), part.sizes)
                return [self._batch(*each) for each in zip(columns, part.sizes, strict=True)]
            # An error belongs to one step: the steps are read one by one.
            return [self._alone(single, columns_of) for single in part.singles()]
        return [self._alone(part, columns_of)]

    def _alone(self, part: StepPart, columns_of: _ColumnsOf) -> Batch | Exception:
        try:
            return self._batch(columns_of(part), part.sizes[0])
        except Exception as error:  # raised when its step is delivered
            return error

    def _columns(
        self, pool: "DecodePool | None", epoch: int, seed: int, part: StepPart
    ) -> Columns:
        if pool is not None:
            return pool.take(part.indices, epoch, seed)
        columns = self.dataset.take(part.indices)
        with self._draws.watched() if self.transform else nullcontext():
            return apply(self.transform, columns, part.indices, epoch, seed)

    def _batch(self, fields: Mapping[str, Values], num_samples: int) -> Batch:
        if self.ragged == "padded":
            fields = _padded(fields)
        if self.pin_memory:
            fields = {name: values.pin_memory() for name, values in fields.items()}
        return Batch(fields, num_samples)


class ReadDepth(NamedTuple):
    """Size of the reads of a rank, and their number at the same time."""

    together: int  # steps that one read gathers: a read costs as much as many small samples
    threads: int
    depth: int  # reads ahead of the consumer, 0 for none

    @classmethod
    def of(
        cls,
        batch_bytes: float,
        *,
        threads: int,
        prefetch: int,
        workers: int = 0,
        is_copy: bool = False,
        has_transform: bool = False,
    ) -> "ReadDepth":
        """Choose, for parts of ``batch_bytes``, of which ``prefetch`` are wanted ahead.

        ``is_copy`` means that reading is no more than a copy from memory to memory,
        ``has_transform`` that the work of each batch is worth a thread.
        """
        if workers:
            # A thread waits for a worker; each worker has its next batch waiting.
            depth = max(prefetch, 2 * workers)
            return cls(1, depth, depth)
        # A batch from a thread is handed over, which costs as well.
        part_bytes = _PART_BYTES if is_copy else _PART_BYTES_OF_THREAD
        most = 1 if has_transform else _MAX_TOGETHER
        together = max(1, min(most, int(part_bytes / max(1.0, batch_bytes))))
        if is_copy:
            # A thread costs more than the copy that it would hide, and more buffers than one
            # fall out of the caches.
            return cls(together, threads, 0)
        depth = prefetch if together == 1 else max(threads, -(-prefetch // together))
        return cls(together, threads, depth)


def cut_apart(columns: Columns, sizes: list[int]) -> Iterator[Columns]:
    """Cut samples that were read together into batches, which share their memory."""
    cuts = [
        _ragged_cuts(values, sizes)
        if isinstance(values, Ragged)
        else torch.split_with_sizes(values, sizes)  # without the Python of `split`
        for values in columns.values()
    ]
    return (dict(zip(columns, values, strict=True)) for values in zip(*cuts, strict=True))


def _ragged_cuts(values: Ragged, sizes: list[int]) -> Iterator[Ragged]:
    start = 0
    for size in sizes:
        offsets = values.offsets[start : start + size + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        yield Ragged(values.values[first:last], offsets - first)
        start += size


def _padded(fields: Mapping[str, Values]) -> Columns:
    """Fill samples up to the longest one of the batch; ``<field>_lengths`` has their lengths."""
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
    """Give the results of ``work(number)`` in order; at most ``depth`` are ahead, 0 for none.

    At the end of the block, however it ends, work in progress is waited for, work that has not
    begun is dropped, and no thread remains.
    """
    if not depth:
        yield map(work, numbers)
        return
    pool = ThreadPoolExecutor(min(threads, depth), thread_name_prefix="hpctrain-loader")
    pending = (pool.submit(work, number) for number in numbers)
    try:
        yield _in_order(pending, depth)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pending: Iterator[Future[T]], depth: int) -> Iterator[T]:
    ahead = deque(islice(pending, depth))
    while ahead:
        # No reference stays here: the memory is used again once the consumer drops it.
        given = [ahead.popleft().result()]
        ahead.extend(islice(pending, 1))
        yield given.pop()
