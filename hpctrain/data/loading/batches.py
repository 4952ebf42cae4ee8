"""Read what one rank needs at its next steps: the work of the loader's threads."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple, TypeVar

import torch

from hpctrain.core.units import MIB
from hpctrain.data.ragged import Ragged, Values
from hpctrain.data.samples import Columns

T = TypeVar("T")

_PART_BYTES = 8 * MIB
_PART_BYTES_OF_THREAD = 16 * MIB
_MOST_TOGETHER = 128


class ReadDepth(NamedTuple):
    """What a rank reads at once, and what at the same time."""

    together: int
    """Steps that one read gathers: a read costs as much as many small samples."""
    threads: int
    depth: int
    """Reads ahead of the consumer, 0 for none."""

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

        ``is_copy`` says that reading is no more than a copy from memory to memory,
        ``has_transform`` that each batch has work of its own, worth a thread.
        """
        if workers:
            # A thread waits for a worker; each worker has its next batch waiting.
            depth = max(prefetch, 2 * workers)
            return cls(1, depth, depth)
        # What a thread reads is handed over, which costs as well.
        part_bytes = _PART_BYTES if is_copy else _PART_BYTES_OF_THREAD
        most = 1 if has_transform else _MOST_TOGETHER
        together = max(1, min(most, int(part_bytes / max(1.0, batch_bytes))))
        if is_copy:
            # A thread costs more than the copy that it would hide, and more buffers than one
            # fall out of the caches.
            return cls(together, threads, 0)
        depth = prefetch if together == 1 else max(threads, -(-prefetch // together))
        return cls(together, threads, depth)


def cut_apart(columns: Columns, sizes: list[int]) -> Iterator[Columns]:
    """Cut what was read together into batches, which share its memory."""
    cuts = zip(*(_cuts(values, sizes) for values in columns.values()), strict=True)
    return (dict(zip(columns, values, strict=True)) for values in cuts)


def _cuts(values: Values, sizes: list[int]) -> Iterator[Values]:
    if not isinstance(values, Ragged):
        return iter(torch.split_with_sizes(values, sizes))  # without the Python of `split`
    return _ragged_cuts(values, sizes)


def _ragged_cuts(values: Ragged, sizes: list[int]) -> Iterator[Ragged]:
    start = 0
    for size in sizes:
        offsets = values.offsets[start : start + size + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        yield Ragged(values.values[first:last], offsets - first)
        start += size


@contextlib.contextmanager
def prefetched(
    work: Callable[[int], T], numbers: Iterable[int], *, threads: int, depth: int
) -> Iterator[Iterator[T]]:
    """Give the results of ``work(number)`` in order; at most ``depth`` are ahead, 0 for none.

    At the end of the block, however it ends, work in progress is waited for, what has not begun
    is dropped, and no thread is left.
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
        # The consumer alone shall have it: its memory is used again once he drops it.
        given = [ahead.popleft().result()]
        ahead.extend(islice(pending, 1))
        yield given.pop()
