"""Prefetching: numbered work ahead of its consumer, handed on in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


@contextmanager
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
