"""A batch out of several shards: each copies its samples to their places in the batch."""

import mmap
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.core.units import KIB
from hpctrain.data.io.mapped import HUGE_BYTES
from hpctrain.data.io.values import Array
from hpctrain.data.samples import Ragged

if TYPE_CHECKING:
    from hpctrain.data.io.open_shard import OpenShard

Empty = Callable[[Sequence[int], np.dtype[Any]], NDArray[Any]]
"""Makes an array to be filled, of a shape and a dtype."""

_SMALL_BYTES = 64 * KIB
_MAX_PER_SIZE = 16
_MAX_SIZES = 8
_MANY = 4096  # samples from which on it is worth a look whether they grow


class Buffers:
    """Uninitialised arrays whose memory is used again: page faults cost more than a batch's copy.

    A view, a tensor of ``torch.from_numpy`` and whatever shares memory with one keep a buffer
    from being handed out again. Several threads may call it at once.
    """

    def __init__(self) -> None:
        self._free: OrderedDict[int, list[NDArray[np.uint8]]] = OrderedDict()

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array to be filled; small ones are always new."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < _SMALL_BYTES:
            return np.empty(shape, dtype)
        # Sizes are rounded up by an eighth at most, so that ragged batches share buffers.
        step = 1 << (num_bytes.bit_length() - 4)
        size = -(-num_bytes // step) * step
        try:
            # The one that became free last is the likeliest to lie in a cache.
            memory = self._free[size].pop()
        except (KeyError, IndexError):
            memory = _fresh(size)
        # Not an array's view but a buffer's: all views of it refer to it, not to the memory.
        whole = np.frombuffer(memory.data, np.uint8)
        weakref.finalize(whole, self._take_back, memory).atexit = False
        return whole[:num_bytes].view(dtype).reshape(shape)

    def _take_back(self, memory: NDArray[np.uint8]) -> None:
        free = self._free.setdefault(len(memory), [])
        if len(free) < _MAX_PER_SIZE:
            free.append(memory)
        if len(self._free) > _MAX_SIZES:
            with suppress(KeyError):
                self._free.popitem(last=False)


def _fresh(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory in large pages where the system has them: a batch fills them sooner."""
    if num_bytes < HUGE_BYTES:
        return np.empty(num_bytes, np.uint8)
    memory = mmap.mmap(-1, num_bytes + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_BYTES
    return whole[start : start + num_bytes]


class Part(NamedTuple):
    """The samples of a batch that one shard has."""

    shard: "OpenShard"
    rows: Array  # numbered from the start of the shard
    places: Array | None  # where they belong in the batch, None if they are all of it


def split(wanted: Array, starts: Array) -> Iterator[tuple[int, Array, Array | None]]:
    """Yield ``(shard, rows, places)`` for each shard that has some of the samples.

    ``starts`` are the first samples of all shards, and the end of the last one.
    """
    if len(starts) == 2:
        yield 0, wanted, None
        return
    if len(wanted) > _MANY and (wanted[1:] >= wanted[:-1]).all():
        edges = np.searchsorted(wanted, starts).tolist()
        for home, (start, stop) in enumerate(pairwise(edges)):
            if start < stop:
                yield home, wanted[start:stop] - starts[home], np.arange(start, stop)
        return
    homes = np.searchsorted(starts, wanted, side="right") - 1
    order = np.argsort(homes, kind="stable")
    homes = homes[order]
    cuts = [0, *(np.flatnonzero(np.diff(homes)) + 1).tolist(), len(wanted)]
    for start, stop in pairwise(cuts):
        if start == stop:
            continue
        home = int(homes[start])
        if stop - start == len(wanted):
            yield home, wanted - starts[home], None
        else:
            places = order[start:stop]
            yield home, wanted[places] - starts[home], places


def gather_ragged(
    name: str, parts: Sequence[Part], shape: Sequence[int], dtype: np.dtype[Any], empty: Empty
) -> Ragged:
    """Return the samples of a ragged field, whose rows have ``shape``."""
    num_samples = sum(len(part.rows) for part in parts)
    offsets = np.zeros(num_samples + 1, np.int64)
    lengths = offsets[1:]
    for shard, rows, places in parts:
        lengths[slice(None) if places is None else places] = shard.lengths(name, rows)
    np.cumsum(lengths, out=lengths)
    out = empty((int(offsets[-1]), *shape), dtype)
    if out.size:
        for shard, rows, places in parts:
            starts = offsets[:-1] if places is None else offsets[places]
            shard.gather_ragged(name, rows, out, starts)
    return Ragged(torch.from_numpy(out), torch.from_numpy(offsets))
