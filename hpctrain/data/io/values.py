"""Readers of the rows of one field of an open shard: mapped, plain or compressed."""

import errno
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.units import KIB, MIB

Array = NDArray[np.int64]

CACHE_BYTES = 512 * MIB
_PLAIN_CHUNK_BYTES = MIB
_LARGE_ROW_BYTES = 32 * KIB  # for larger rows, a second copy is slower than a Python loop


class Values:
    """Base class of readers of the rows of a field in one shard.

    A row is a sample, or in a ragged field one element of a sample. A failed read raises
    ``OSError`` or ``RuntimeError``.
    """

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)``, contiguous; the caller must not change the array."""
        raise NotImplementedError

    def take(self, rows: Array, out: NDArray[Any], places: Array | None) -> None:
        """Copy ``rows[i]`` to ``out[places[i]]``, or to ``out[i]`` without places."""
        places = np.arange(len(rows)) if places is None else places
        self.copy(rows, np.ones_like(rows), out, places)

    def copy(self, starts: Array, lengths: Array, out: NDArray[Any], places: Array) -> None:
        """Copy runs of rows to ``out``, in the order of the file.

        Run ``i`` has ``lengths[i]`` rows, starts at row ``starts[i]``, and is copied to ``out``
        from ``out[places[i]]`` on.
        """
        order = np.argsort(starts, kind="stable")
        runs = zip(*(column[order].tolist() for column in (starts, lengths, places)), strict=True)
        for start, count, place in runs:
            if count:
                out[place : place + count] = self.between(start, start + count)


class MappedValues(Values):
    """Rows of an array in memory: a view of the mapped file, or a copy of all rows."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Return a view of rows ``[start, stop)``."""
        return self._array[start:stop]

    def take(self, rows: Array, out: NDArray[Any], places: Array | None) -> None:
        """Copy small rows in one call of numpy, large rows one by one without a buffer."""
        if places is None:
            # numpy buffers the result unless ``mode`` defines what indices out of range do.
            self._array.take(rows, axis=0, out=out, mode="clip")
        elif out.strides[0] < _LARGE_ROW_BYTES:
            out[places] = self._array.take(rows, axis=0, mode="clip")
        else:
            super().take(rows, out, places)


class DirectValues(Values):
    """Rows that are stored as plain bytes, and read with ``pread`` when they are needed.

    ``offset`` is the position of the first byte in the file, ``shape`` the shape of a row.
    """

    def __init__(
        self, descriptor: int, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._descriptor, self._offset = descriptor, offset
        self._shape, self._dtype = shape, dtype
        self._row_bytes = prod(shape) * dtype.itemsize

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)``, read from the file."""
        size = (stop - start) * self._row_bytes
        data = read_at(self._descriptor, self._offset + start * self._row_bytes, size)
        return data.view(self._dtype).reshape(stop - start, *self._shape)


def read_at(descriptor: int, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """Return ``num_bytes`` bytes of a file from ``offset``.

    Raises ``OSError``: the file cannot be read, or is too short (EIO).
    """
    out = np.empty(num_bytes, np.uint8)
    read_into(descriptor, out.data, offset)
    return out


def read_into(descriptor: int, memory: memoryview, offset: int) -> None:
    """Fill ``memory`` with bytes of a file from ``offset``; raises the errors of ``read_at``."""
    while memory:
        count = os.preadv(descriptor, [memory], offset)
        if not count:
            raise OSError(errno.EIO, "the file ends before its data")
        memory, offset = memory[count:], offset + count


class ChunkCache:
    """Least-recently-used cache of decoded chunks, limited in bytes; thread-safe."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._chunks: OrderedDict[tuple[int, int], NDArray[Any]] = OrderedDict()
        self._lock = Lock()
        self.numbers = itertools.count()
        """Counter for the first element of a key; this element identifies a field of a shard."""

    def get(self, key: tuple[int, int], decode: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return a chunk from the cache, or call ``decode`` and store its result."""
        with self._lock:  # also while decoding, as HDF5 decodes only one chunk at a time
            if key not in self._chunks:
                self._chunks[key] = decode()
                self._num_bytes += self._chunks[key].nbytes
            self._chunks.move_to_end(key)
            while self._num_bytes > self._max_bytes and len(self._chunks) > 1:
                self._num_bytes -= self._chunks.popitem(last=False)[1].nbytes
            return self._chunks[key]


class CachedValues(Values):
    """Rows of a chunked or compressed HDF5 dataset; decoded chunks are cached.

    ``dataset`` is an open HDF5 dataset ``(num_rows, *shape)``.
    """

    def __init__(self, dataset: Any, cache: ChunkCache) -> None:
        self._dataset, self._cache, self._number = dataset, cache, next(cache.numbers)
        row_bytes = max(1, prod(dataset.shape[1:]) * dataset.dtype.itemsize)
        plain_rows = max(1, _PLAIN_CHUNK_BYTES // row_bytes)
        self._chunk_rows = int(dataset.chunks[0]) if dataset.chunks else plain_rows

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)``: a view if they are in one chunk, otherwise a copy."""
        size = self._chunk_rows
        pieces = []
        for home in range(start // size, max(start, stop - 1) // size + 1):
            chunk = self._cache.get((self._number, home), partial(self._decoded, home))
            pieces.append(chunk[max(0, start - home * size) : stop - home * size])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _decoded(self, home: int) -> NDArray[Any]:
        rows = slice(home * self._chunk_rows, (home + 1) * self._chunk_rows)
        return np.ascontiguousarray(self._dataset[rows])
