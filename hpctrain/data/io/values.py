"""The rows of one field in one open shard: mapped, read on demand, or decoded by chunks.

Three ways, one shape. A row is one sample, or of a ragged field one element of a sample.
"""

from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.units import KIB
from hpctrain.data.io.direct import read_at, read_pieces

Array = NDArray[np.int64]

_LARGE_BYTES = 8 * KIB
"""Rows from here on are copied one by one: a copy in between costs more than the calls."""
_FETCHED_BYTES = range(KIB, 8 * KIB + 1)
"""Rows that are copied faster if their first bytes were fetched before."""
_FETCHED = 8192
"""Rows whose first bytes are fetched together: so many lines stay in a cache until then, and for
each call another thread may have to be waited for."""


class Values(Protocol):
    """The values of one field; reading them raises OSError or RuntimeError."""

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Return the rows [start, stop), contiguous in memory, not to be changed."""

    def take(self, rows: Array, out: NDArray[Any], places: Array | None) -> None:
        """Copy ``rows[i]`` to ``out[places[i]]``, or ``out[i]``."""

    def copy(self, starts: Array, lengths: Array, out: NDArray[Any], places: Array) -> None:
        """Copy ``lengths[i]`` rows from ``starts[i]`` on to ``out[places[i]:]``."""

    def extents(self, starts: Array, stops: Array) -> tuple[Array, Array]:
        """Return where the rows ``[starts[i], stops[i])`` lie in the file: from byte, to byte."""


class ValueSource(Protocol):
    """Where whole chunks of a field come from."""

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Return the rows [start, stop), contiguous in memory."""

    def extents(self, starts: Array, stops: Array) -> tuple[Array, Array]:
        """Return where the rows ``[starts[i], stops[i])`` lie in the file: from byte, to byte."""


class MappedValues:
    """An array that is the file itself."""

    def __init__(self, array: NDArray[Any], offset: int) -> None:
        """Take the array ``(num_rows, *shape)`` and its first byte in the file."""
        self._array = array
        self._offset = offset
        self._row_bytes = row_bytes(array)

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Return the bytes in the file themselves."""
        return self._array[start:stop]

    def take(self, rows: Array, out: NDArray[Any], places: Array | None) -> None:
        """Copy rows."""
        if places is None:
            take_rows(self._array, rows, out)
        elif self._row_bytes < _LARGE_BYTES:
            out[places] = self._array.take(rows, axis=0, mode="clip")
        else:
            for row, place in zip(rows.tolist(), places.tolist(), strict=True):
                out[place] = self._array[row]

    def copy(self, starts: Array, lengths: Array, out: NDArray[Any], places: Array) -> None:
        """Copy runs of rows."""
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

    def extents(self, starts: Array, stops: Array) -> tuple[Array, Array]:
        """Return the bytes of rows."""
        return self._offset + starts * self._row_bytes, self._offset + stops * self._row_bytes


class DirectValues:
    """Plain bytes of a file, read where they are wanted."""

    def __init__(
        self, descriptor: int, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        """Take the open file, the first byte and what is there: ``(num_rows, *shape)``."""
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
        size, first = self._row_bytes, self._offset
        order = range(len(rows)) if places is None else places.tolist()
        pieces = [
            (first + row * size, size, place * size)
            for row, place in zip(rows.tolist(), order, strict=True)
        ]
        read_pieces(self._descriptor, pieces, as_bytes(out))

    def copy(self, starts: Array, lengths: Array, out: NDArray[Any], places: Array) -> None:
        """Read runs of rows straight to their places."""
        size = self._row_bytes
        columns = self._offset + starts * size, lengths * size, places * size
        pieces = zip(*(column.tolist() for column in columns), strict=True)
        read_pieces(self._descriptor, (piece for piece in pieces if piece[1]), as_bytes(out))

    def extents(self, starts: Array, stops: Array) -> tuple[Array, Array]:
        """Return the bytes of rows."""
        return self._offset + starts * self._row_bytes, self._offset + stops * self._row_bytes


def take_rows(source: NDArray[Any], rows: Array, out: NDArray[Any]) -> None:
    """Copy ``source[rows]`` to ``out``; all are contiguous, and rows in range.

    Copying a row of a few KB from memory, the processor waits for its first bytes, and fetches
    the others ahead. So one byte of each of many rows is read before: it waits for all of them at
    the same time. Longer rows hide the wait, and of shorter ones a read costs as much as a copy.
    """
    size = row_bytes(out)
    if size not in _FETCHED_BYTES:
        # numpy buffers the result unless told how to treat indices out of range.
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
