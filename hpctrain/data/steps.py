"""Samples of each step of an epoch on a rank, and those it will read soon."""

import contextlib
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.core.units import MIB
from hpctrain.data.order.order import Order
from hpctrain.data.order.window import WindowOrder, rank_lanes
from hpctrain.data.samples import Columns, Indices, Ragged, Values
from hpctrain.data.tools.faults import merged

Tail = Literal["short", "drop"]

PLANNED = 65536
"""Positions that are turned into samples at a time: a call of numpy costs as much as many."""
AHEAD = 8  # steps between asking for single samples and reading them, about
ASKED = 1024  # blocks that are asked for together, about


class Skipped:
    """A set of samples as ranges; never changed, so that threads may share it."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """Join ranges ``[start, stop)``, which may overlap and touch."""
        self.ranges = merged(ranges)
        self._bounds = np.array(self.ranges, np.int64).ravel()

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def joined(self, start: int, stop: int) -> "Skipped":
        """Return these samples and ``[start, stop)``."""
        return Skipped([*self.ranges, (start, stop)])

    def covers(self, start: int, stop: int) -> bool:
        """Say whether all of ``[start, stop)`` is in here."""
        place = bisect_left(self.ranges, (start + 1,))
        return place > 0 and stop <= self.ranges[place - 1][1]

    def holds(self, indices: Indices) -> NDArray[np.bool_]:
        """Say for each index whether it is in here."""
        # Between an odd number of bounds and the next one lies a range.
        inside: NDArray[np.bool_] = np.searchsorted(self._bounds, indices, side="right") % 2 == 1
        return inside


@dataclass(frozen=True, slots=True)
class StepPart:
    """What one rank reads at once: its samples of one or several steps."""

    indices: Indices  # of all the steps, one after another
    sizes: list[int]  # samples of each step

    def singles(self) -> "list[StepPart]":
        """Return the same with each step alone."""
        if len(self.sizes) == 1:
            return [self]
        pieces = np.split(self.indices, np.cumsum(self.sizes)[:-1])
        return [StepPart(piece, [size]) for piece, size in zip(pieces, self.sizes, strict=True)]

    def without(self, skipped: Skipped) -> "StepPart":
        """Return the same without some samples."""
        kept = ~skipped.holds(self.indices)
        if kept.all():
            return self
        of_steps = np.split(kept, np.cumsum(self.sizes)[:-1])
        return StepPart(self.indices[kept], [int(np.count_nonzero(one)) for one in of_steps])


def num_steps(num_samples: int, global_batch: int, tail: Tail) -> int:
    """Return how many steps so many samples make."""
    full, rest = divmod(num_samples, global_batch)
    return full + (rest > 0 and tail != "drop")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How the line of an epoch is cut: among steps, and each step among the ranks."""

    num_samples: int
    start: int  # samples of the epoch that were consumed before the first step
    global_batch: int
    tail: Tail
    rank: int
    size: int
    micro_shards: int | None = None
    """Fixed parts of a global batch, of which each rank takes some; None for one per rank."""

    @property
    def num_parts(self) -> int:
        """Parts of a global batch."""
        return self.micro_shards or self.size

    @property
    def own_parts(self) -> range:
        """Parts of this rank: contiguous, as many as another rank has or one more or less."""
        total = self.num_parts
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def share(self, total: int) -> slice:
        """Return which of the samples of a global batch this rank has."""
        parts = self.own_parts
        return slice(total * parts.start // self.num_parts, total * parts.stop // self.num_parts)

    def __len__(self) -> int:
        """Return the number of steps, the same on every rank."""
        return num_steps(self.num_samples - self.start, self.global_batch, self.tail)

    @property
    def num_full(self) -> int:
        """Steps that have a whole global batch."""
        return (self.num_samples - self.start) // self.global_batch

    def positions(self, step: int) -> range:
        """Return the positions of a step, of all ranks."""
        start = self.start + step * self.global_batch
        return range(start, min(start + self.global_batch, self.num_samples))


class Steps:
    """The parts of one rank, and what it should ask for ahead of them. Threads may share it.

    A global batch is the samples at its positions, whatever the number of ranks. They are
    sorted by lane, if the order has lanes, before each rank gets a contiguous part: so a rank
    reads few of the lanes.
    """

    def __init__(self, order: Order, cut: Cut, together: int, num_ahead: int) -> None:
        """Read so many steps ``together`` as a part, and keep the plans of ``num_ahead`` parts."""
        self._order, self._cut, self._together = order, cut, together
        self._num_steps = len(cut)
        self._ahead = -(-AHEAD // together)
        self._group = max(1, PLANNED // (cut.global_batch * together))
        self._num_kept = 2 + (num_ahead + self._ahead) // self._group
        self._plans: dict[int, list[StepPart]] = {}
        self._planning = threading.Lock()

    def __len__(self) -> int:
        return ceil(self._num_steps / self._together)

    def part(self, number: int) -> StepPart:
        """Return what this rank reads at once."""
        group, place = divmod(number, self._group)
        with self._planning:
            if group not in self._plans:
                self._plans[group] = self._plan(group)
                while len(self._plans) > self._num_kept:
                    del self._plans[min(self._plans)]
            return self._plans[group][place]

    def soon(self, number: int) -> Indices:
        """Return the samples to ask for when a part is about to be read.

        Over all parts, each sample or block once. Blocks are asked for a window ahead.
        """
        if isinstance(self._order, WindowOrder):
            return self._blocks_soon(self._order, number)
        later = number + self._ahead
        parts = range(1 if number == 0 else later, min(later + 1, len(self)))
        if len(parts) == 1:
            return self.part(parts[0]).indices
        found = [self.part(one).indices for one in parts]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _blocks_soon(self, order: WindowOrder, number: int) -> Indices:
        cut, steps = self._cut, self._steps(number, 1)
        own = cut.own_parts
        lanes = rank_lanes(own.start, own.stop, size=cut.num_parts, lanes=order.shape.lanes)
        start = cut.positions(steps.start).start
        stop = cut.positions(steps[-1]).stop
        # A part needs few new blocks, and to ask for them costs as much as to look at many.
        few = max(1, min(ASKED // max(1, len(lanes)), order.shape.window // 4))
        turns = range(order.turns_needed(start, few), order.turns_needed(stop, few))
        if number == 0:
            begun = order.turns_begun(start)
            turns = range(begun.start, max(begun.stop, turns.stop))
        blocks = order.blocks(lanes, turns)
        if number == 0:
            blocks = np.concatenate([blocks, order.rest_blocks(lanes)])
        samples = np.sort(blocks)[:, None] * order.shape.block + np.arange(order.shape.block)
        return samples[samples < cut.num_samples]

    def _steps(self, first_part: int, num_parts: int) -> range:
        start = first_part * self._together
        return range(start, min(start + num_parts * self._together, self._num_steps))

    def _plan(self, group: int) -> list[StepPart]:
        cut, steps = self._cut, self._steps(group * self._group, self._group)
        num_full = min(len(steps), max(0, cut.num_full - steps.start))
        first = cut.start + steps.start * cut.global_batch
        full = np.arange(first, first + num_full * cut.global_batch)
        rows = self._mine(full.reshape(num_full, cut.global_batch))
        mine, sizes = [rows.ravel()], [rows.shape[1]] * num_full
        for step in steps[num_full:]:  # the short tail
            (tail,) = self._mine(np.array(cut.positions(step))[None])
            mine.append(tail)
            sizes.append(len(tail))
        samples = self._order.samples_at(np.concatenate(mine))
        ends = np.cumsum(sizes).tolist()
        parts, start = [], 0
        for place in range(0, len(steps), self._together):
            some = slice(place, place + self._together)
            stop = ends[some][-1]
            parts.append(StepPart(samples[start:stop], sizes[some]))
            start = stop
        return parts

    def _mine(self, positions: Indices) -> Indices:
        """Return what this rank has of ``(num_steps, samples of a step)`` positions."""
        if isinstance(self._order, WindowOrder) and positions.size:
            lanes = self._order.lanes_of(positions.ravel()).reshape(positions.shape)
            by_lane = np.argsort(lanes, axis=1, kind="stable")
            positions = np.take_along_axis(positions, by_lane, axis=1)
        return positions[:, self._cut.share(positions.shape[1])]


T = TypeVar("T")

_PART_BYTES = 8 * MIB
_PART_BYTES_OF_THREAD = 16 * MIB
_MOST_TOGETHER = 128


class ReadDepth(NamedTuple):
    """What a rank reads at once, and what at the same time."""

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
