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
from hpctrain.data.io.values import Array, as_bytes, row_bytes

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
    """Values of an HDF5 dataset that has no plain bytes in the file, read chunk by chunk."""

    def __init__(self, dataset: Any, cache: ChunkCache) -> None:
        """Take the open dataset ``(num_rows, *shape)``."""
        self._dataset, self._num_rows = dataset, len(dataset)
        self._cache, self._number = cache, cache.new_number()
        sample_bytes = max(1, prod(dataset.shape[1:]) * dataset.dtype.itemsize)
        plain_rows = max(1, _PLAIN_CHUNK_BYTES // sample_bytes)
        self._chunk_rows = int(dataset.chunks[0]) if dataset.chunks else plain_rows

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
