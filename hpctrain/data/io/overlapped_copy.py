"""Samples copied to where they will be taken, while others are still being read.

Reading waits for the disk, copying for memory: at the same time, both take as long as one of them.
"""

import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from threading import Condition, Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.format.layout import Field
from hpctrain.data.io.ahead import runs_of
from hpctrain.data.io.largepages import first_large_page, large_pages
from hpctrain.data.io.mapped import PAGE_BYTES, View
from hpctrain.data.io.shardfile import ShardFile
from hpctrain.data.io.values import Array
from hpctrain.data.ragged import Values


class PartedArray:
    """To be filled as one array, and then handed out in parts."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Reserve memory, in large pages where the system has them; it is taken when filled."""
        num_bytes = prod(shape) * dtype.itemsize
        self._memory = large_pages(num_bytes)
        every = np.frombuffer(self._memory, np.uint8)
        self._begin = first_large_page(every)
        self.values: NDArray[Any] = (
            every[self._begin : self._begin + num_bytes].view(dtype).reshape(shape)
        )
        """All of it."""

    def part(self, start: int, stop: int) -> NDArray[Any]:
        """Return ``values[start:stop]``, which may be done once.

        What ``values`` shows there is lost with the last view of the part.
        """
        some = self.values[start:stop]
        if not some.nbytes:
            return some
        begin = self._begin + start * some.strides[0]
        owner = _Part(self._memory, begin, begin + some.nbytes)
        return np.asarray(
            View(owner, some.ctypes.data, some.shape, some.dtype.str, is_readonly=False)
        )


class _Part:
    """The bytes ``[begin, end)`` of some memory, while somebody uses them."""

    def __init__(self, memory: mmap.mmap, begin: int, end: int) -> None:
        self._memory, self._begin, self._end = memory, begin, end

    def __del__(self) -> None:
        """Give back the pages that hold nothing of other parts."""
        begin = -(-self._begin // PAGE_BYTES) * PAGE_BYTES
        if (num_bytes := self._end // PAGE_BYTES * PAGE_BYTES - begin) > 0:
            self._memory.madvise(mmap.MADV_DONTNEED, begin, num_bytes)


Parts = Callable[[], Sequence[Array]]
"""Gives the samples of each part of an epoch, in the order in which the parts will be taken."""
Late = Callable[[Array], Mapping[str, Any]]
"""Takes samples, given by their places in a part, by field."""


class _Plan(NamedTuple):
    """Where samples go."""

    places: Array
    """Of each sample of the data set; behind the end for one that nobody takes."""
    edges: list[int]
    """Where each part begins, and the end."""
    arrays: dict[str, PartedArray]
    """The samples of each field, in their order."""
    is_here: NDArray[np.bool_]
    """Which places are filled."""


class EarlyCopies:
    """The samples of an epoch, of a data set that is read whole before its first batch.

    They take as much memory as the data set does, less with every part that was taken and
    dropped. What was not copied, for instance of a damaged block, is taken as usual.
    """

    def __init__(self, fields: Mapping[str, Field], num_samples: int, parts: Parts) -> None:
        """Plan nothing yet: that would keep the disk waiting.

        Args:
            fields: what to copy; none is ragged.
            num_samples: of the data set.
            parts: what will be taken; called once, while files are read.
        """
        self._fields, self._num_samples, self._parts = fields, num_samples, parts
        self._num_coming = 0
        """Blocks on their way."""
        self._all_came = Condition()
        self._plan: _Plan | None = None
        self._lock = Lock()

    def expect(self, file: ShardFile, first: int, blocks: Array) -> Callable[[Array], None]:
        """Return what is to bring blocks of a file, some at a time, in place of ``file.bring``.

        Args:
            file: mapped.
            first: its first sample in the data set.
            blocks: all of which will be brought, each once.
        """
        with self._all_came:
            self._num_coming += len(blocks)

        def bring(some: Array) -> None:
            try:
                file.bring(some, then=partial(self._copy, file, first))
            finally:
                with self._all_came:
                    self._num_coming -= len(some)
                    self._all_came.notify_all()

        return bring

    def take(self, number: int, late: Late) -> dict[str, Values] | None:
        """Return the samples of a part, once; None if none of them was copied.

        Waits until all blocks that are expected have come: then nothing is copied any more.

        Args:
            number: of the part.
            late: takes those that were not copied.
        """
        with self._all_came:
            self._all_came.wait_for(lambda: not self._num_coming)
        plan = self._plan
        if plan is None:
            return None
        start, stop = plan.edges[number : number + 2]
        gaps = np.flatnonzero(~plan.is_here[start:stop])
        if len(gaps) == stop - start:
            return None
        plan.is_here[start:stop] = False
        part = {name: array.part(start, stop) for name, array in plan.arrays.items()}
        for name, values in (late(gaps) if len(gaps) else {}).items():
            part[name][gaps] = values
        return {name: torch.from_numpy(array) for name, array in part.items()}

    def _copy(self, file: ShardFile, first: int, blocks: Array) -> None:
        plan, size = self._planned(), file.block_size
        starts, stops = runs_of(blocks)
        ends = np.minimum(stops * size, file.shard.num_samples)
        for start, stop in zip((starts * size).tolist(), ends.tolist(), strict=True):
            places = plan.places[first + start : first + stop]
            wanted = places < plan.edges[-1]
            is_all = bool(wanted.all())
            places = places if is_all else places[wanted]
            for name, array in plan.arrays.items():
                rows = file.values[name].between(start, stop)
                array.values[places] = rows if is_all else rows[wanted]
            plan.is_here[places] = True

    def _planned(self) -> _Plan:
        with self._lock:
            if self._plan is None:
                parts = self._parts()
                edges = [0, *accumulate(len(part) for part in parts)]
                end = edges[-1]
                places = np.full(self._num_samples, end)
                # From the end: a sample that comes twice is copied to where it comes first.
                places[np.concatenate(parts)[::-1]] = np.arange(end)[::-1]
                arrays = {
                    name: PartedArray((end, *field.shape), np.dtype(field.dtype))
                    for name, field in self._fields.items()
                }
                self._plan = _Plan(places, edges, arrays, np.zeros(end, bool))
            return self._plan
