"""Values by whole chunks, decoded or read once for many uses, in a bounded cache."""

import itertools
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.units import MIB
from hpctrain.data.io.values import Array, ValueSource, as_bytes, row_bytes

CACHE_BYTES = 512 * MIB
_PLAIN_CHUNK_BYTES = MIB

Key = tuple[int, int]


class ChunkCache:
    """Decoded chunks, those used last, as many as fit; several threads may use it at once."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        """Start empty; the chunk used last is always kept."""
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._chunks: OrderedDict[Key, NDArray[Any]] = OrderedDict()
        self._lock = Lock()
        self._decoding = Lock()
        self._numbers = itertools.count()

    def new_number(self) -> int:
        """Return the first half of the keys of one field in one file, different from others."""
        return next(self._numbers)

    def get(self, key: Key, decode: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return a chunk, decoded by ``decode`` unless it is here; one is decoded at a time."""
        found = self._find(key)
        if found is None:
            # HDF5 decodes one chunk at a time anyway; waiting here, nobody decodes one twice.
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
    """Values that are read chunk by chunk, by HDF5."""

    def __init__(
        self, source: ValueSource, num_rows: int, chunk_rows: int, cache: ChunkCache
    ) -> None:
        """Take what reads a chunk, and how many rows it has."""
        self._source = source
        self._cache = cache
        self._number = cache.new_number()
        self._num_rows, self._chunk_rows = num_rows, chunk_rows

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows of a chunk, or join those of several."""
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
        for start, count, place in zip(
            starts[order].tolist(), lengths[order].tolist(), places[order].tolist(), strict=True
        ):
            done = 0
            while done < count:
                home, inside = divmod(start + done, self._chunk_rows)
                part = min(count - done, self._chunk_rows - inside)
                source = as_bytes(self._chunk(home))
                at, end = (place + done) * size, (place + done + part) * size
                target[at:end] = source[inside * size : (inside + part) * size]
                done += part

    def _chunk(self, home: int) -> NDArray[Any]:
        start = home * self._chunk_rows
        stop = min(start + self._chunk_rows, self._num_rows)
        return self._cache.get((self._number, home), lambda: self._source.between(start, stop))


def chunk_rows_for(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return how many rows of ``(num_rows, *shape)`` without chunks are read at once."""
    return max(1, _PLAIN_CHUNK_BYTES // max(1, prod(shape) * dtype.itemsize))
