"""The rows of one field in one open shard: mapped, read on demand, or decoded by chunks.

Three classes with one interface. A row is one sample, or one element of a ragged sample.
"""

import errno
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.units import KIB, MIB

Array = NDArray[np.int64]

_LARGE_BYTES = 8 * KIB
"""Rows from here on are copied one by one: a copy in between costs more than the calls."""
_FETCHED_BYTES = range(KIB, 8 * KIB + 1)
"""Rows that are copied faster if their first bytes were fetched before."""
_FETCHED = 8192
"""Rows whose first bytes are fetched together: their lines stay in a cache until then, and for
each call another thread may have to be waited for."""
_MAX_BUFFERS = 512
_MAX_BYTES = 8 * MIB


class MappedValues:
    """An array that is the file itself, or was read from it at once."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self._row_bytes = row_bytes(array)

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Return the rows [start, stop), contiguous in memory, not to be changed."""
        return self._array[start:stop]

    def take(self, rows: Array, out: NDArray[Any], places: Array | None) -> None:
        """Copy ``rows[i]`` to ``out[places[i]]``, or ``out[i]``."""
        if places is None:
            take_rows(self._array, rows, out)
        elif self._row_bytes < _LARGE_BYTES:
            out[places] = self._array.take(rows, axis=0, mode="clip")
        else:
            for row, place in zip(rows.tolist(), places.tolist(), strict=True):
                out[place] = self._array[row]

    def copy(self, starts: Array, lengths: Array, out: NDArray[Any], places: Array) -> None:
        """Copy ``lengths[i]`` rows from ``starts[i]`` on to ``out[places[i]:]``."""
        source, target, size = as_bytes(self._array), as_bytes(out), self._row_bytes
        if not len(source) or not len(target):
            return
        for start, count, place in zip(
            (starts * size).tolist(),
            (lengths * size).tolist(),
            (places * size).tolist(),
            strict=True,
        ):
            target[place : place + count] = source[start : start + count]


class DirectValues:
    """Plain bytes of a file, read where they are wanted."""

    def __init__(
        self, descriptor: int, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        """Take the open file, the first byte and the shape ``(num_rows, *shape)``."""
        self._descriptor = descriptor
        self._offset = offset
        self._shape, self.dtype = shape, dtype
        self._row_bytes = prod(shape[1:]) * dtype.itemsize

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Read rows."""
        size = (stop - start) * self._row_bytes
        data = read_at(self._descriptor, self._offset + start * self._row_bytes, size)
        return data.view(self.dtype).reshape(stop - start, *self._shape[1:])

    def take(self, rows: Array, out: NDArray[Any], places: Array | None) -> None:
        """Read rows straight to their places."""
        places = np.arange(len(rows)) if places is None else places
        self.copy(rows, np.ones_like(rows), out, places)

    def copy(self, starts: Array, lengths: Array, out: NDArray[Any], places: Array) -> None:
        """Read runs of rows straight to their places."""
        size = self._row_bytes
        columns = self._offset + starts * size, lengths * size, places * size
        pieces = zip(*(column.tolist() for column in columns), strict=True)
        read_pieces(self._descriptor, (piece for piece in pieces if piece[1]), as_bytes(out))


def take_rows(source: NDArray[Any], rows: Array, out: NDArray[Any]) -> None:
    """Copy ``source[rows]`` to ``out``; all are contiguous, and rows in range.

    Copying a row of a few KB from memory, the processor waits for its first bytes, and fetches
    the others ahead. So one byte of each of many rows is read before: it waits for all of them at
    the same time. Longer rows hide the wait, and of shorter ones a read costs as much as a copy.
    """
    size = row_bytes(out)
    if size not in _FETCHED_BYTES:
        # numpy buffers the result unless ``mode`` says how to treat indices out of range.
        source.take(rows, axis=0, out=out, mode="clip")
        return
    first_bytes = source.reshape(-1).view(np.uint8)
    for start in range(0, len(rows), _FETCHED):
        some = slice(start, start + _FETCHED)
        first_bytes.take(rows[some] * size, mode="clip")
        source.take(rows[some], axis=0, out=out[some], mode="clip")


def as_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array."""
    # An array of no bytes cannot be cast, and one of 0 dimensions has no length.
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")


def row_bytes(array: NDArray[Any]) -> int:
    """Return the bytes of ``array[i]``."""
    return prod(array.shape[1:]) * array.itemsize


def read_pieces(descriptor: int, pieces: Iterable[tuple[int, int, int]], out: memoryview) -> None:
    """Copy pieces of a file: of each ``(offset, size, place)``, to ``out[place:place + size]``.

    Pieces that touch in the file are read by one call, whatever their places. Raises ``OSError``:
    the file cannot be read, or ends before (EIO).
    """
    run: list[memoryview] = []
    start = stop = 0
    for offset, size, place in sorted(pieces):
        if offset != stop or len(run) == _MAX_BUFFERS or stop - start > _MAX_BYTES:
            if run:
                read_into(descriptor, run, start, stop - start)
            run, start = [], offset
        run.append(out[place : place + size])
        stop = offset + size
    if run:
        read_into(descriptor, run, start, stop - start)


def read_at(descriptor: int, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """Return bytes of a file.

    Raises ``OSError``: the file cannot be read, or ends before (EIO).
    """
    out = np.empty(num_bytes, np.uint8)
    if num_bytes:
        read_into(descriptor, [out.data], offset, num_bytes)
    return out


def read_into(descriptor: int, buffers: Sequence[memoryview], offset: int, num_bytes: int) -> None:
    """Fill buffers, ``num_bytes`` in all, with consecutive bytes of a file."""
    done = os.preadv(descriptor, buffers, offset)
    while done < num_bytes:
        # Rare: a signal, or more than 2 GiB at once.
        rest, skip = [], done
        for buffer in buffers:
            rest.append(buffer[min(skip, len(buffer)) :])
            skip -= min(skip, len(buffer))
        count = os.preadv(descriptor, rest, offset + done)
        if not count:
            raise OSError(errno.EIO, "the file ends before its data")
        done += count


CACHE_BYTES = 512 * MIB
_PLAIN_CHUNK_BYTES = MIB

Key = tuple[int, int]


class ChunkCache:
    """Decoded chunks, those used last, as many as fit; several threads may use it at once."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._chunks: OrderedDict[Key, NDArray[Any]] = OrderedDict()
        self._lock = Lock()
        self._decoding = Lock()
        self.numbers = itertools.count()
        """First halves of keys: each field of a file takes one."""

    def get(self, key: Key, decode: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return a chunk, decoded by ``decode`` unless it is here; one is decoded at a time."""
        found = self._find(key)
        if found is None:
            # HDF5 decodes one chunk at a time anyway; by this lock none is decoded twice.
            with self._decoding:
                found = self._find(key)
                if found is None:
                    found = decode()
                    self._keep(key, found)
        return found

    def _find(self, key: Key) -> NDArray[Any] | None:
        with self._lock:
            found = self._chunks.get(key)
            if found is not None:
                self._chunks.move_to_end(key)
            return found

    def _keep(self, key: Key, chunk: NDArray[Any]) -> None:
        with self._lock:
            self._chunks[key] = chunk
            self._num_bytes += chunk.nbytes
            while self._num_bytes > self.max_bytes and len(self._chunks) > 1:
                self._num_bytes -= self._chunks.popitem(last=False)[1].nbytes


class CachedValues:
    """Values of an HDF5 dataset that has no plain bytes in the file, read chunk by chunk."""

    def __init__(self, dataset: Any, cache: ChunkCache) -> None:
        """Take the open dataset ``(num_rows, *shape)``."""
        self._dataset, self._num_rows = dataset, len(dataset)
        self._cache, self._number = cache, next(cache.numbers)
        sample_bytes = max(1, prod(dataset.shape[1:]) * dataset.dtype.itemsize)
        plain_rows = max(1, _PLAIN_CHUNK_BYTES // sample_bytes)
        self._chunk_rows = int(dataset.chunks[0]) if dataset.chunks else plain_rows

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows of a chunk, or of several, joined."""
        first, last = start // self._chunk_rows, max(start, stop - 1) // self._chunk_rows
        pieces = []
        for home in range(first, last + 1):
            base = home * self._chunk_rows
            pieces.append(self._chunk(home)[max(0, start - base) : stop - base])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def take(self, rows: Array, out: NDArray[Any], places: Array | None) -> None:
        """Copy rows, chunk by chunk."""
        if self._num_rows <= self._chunk_rows:
            out[slice(None) if places is None else places] = self._chunk(0)[rows]
            return
        homes = rows // self._chunk_rows
        for home in np.unique(homes).tolist():
            here = np.flatnonzero(homes == home)
            chunk = self._chunk(home)
            some = chunk.take(rows[here] - home * self._chunk_rows, axis=0, mode="clip")
            out[here if places is None else places[here]] = some

    def copy(self, starts: Array, lengths: Array, out: NDArray[Any], places: Array) -> None:
        """Copy runs of rows, chunk by chunk."""
        target, size = as_bytes(out), row_bytes(out)
        order = np.argsort(starts, kind="stable")
        runs = zip(*(column[order].tolist() for column in (starts, lengths, places)), strict=True)
        for start, count, place in runs:
            if count:
                rows = self.between(start, start + count)
                target[place * size : (place + count) * size] = as_bytes(rows)

    def _chunk(self, home: int) -> NDArray[Any]:
        rows = slice(home * self._chunk_rows, (home + 1) * self._chunk_rows)
        return self._cache.get(
            (self._number, home), lambda: np.ascontiguousarray(self._dataset[rows])
        )


Values = MappedValues | DirectValues | CachedValues
"""The values of one field; reading them raises OSError or RuntimeError."""
