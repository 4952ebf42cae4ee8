"""Operations on rows of tables: keys, copies, and sums by row."""

import weakref
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Places: TypeAlias = NDArray[np.int64]
"""Numbers of rows, ``(rows,)``."""
Bytes: TypeAlias = NDArray[np.uint8]

CHUNK_BYTES = 1 << 20
"""Bytes of rows that are processed at once: they fit into the cache of a core."""
_PLACE_BITS = 32
_PLACES = (1 << _PLACE_BITS) - 1


def keys_of(rows: Places, places: Places | int) -> Places:
    """Return one number for each pair, which sorts by row, then by the place of a value."""
    return (rows << _PLACE_BITS) | places


def rows_of(keys: Places) -> Places:
    """Return the rows of keys."""
    return keys >> _PLACE_BITS


def places_of(keys: Places) -> Places:
    """Return the places of keys."""
    return keys & _PLACES


def keys_at(rows: Places, first: int = 0) -> Places:
    """Return keys of rows whose values are at consecutive places, from ``first`` on."""
    return keys_of(rows, np.arange(first, first + len(rows)))


def take(rows: Tensor, places: Places) -> Tensor:
    """Return a copy of some rows, ``(places, width)``."""
    if rows.dtype is torch.float32 and len(places):  # its kernel prefetches
        return bag_sums(rows, places, np.arange(len(places)))
    return rows.index_select(0, torch.from_numpy(places))


def bag_sums(rows: Tensor, places: Places, starts: Places) -> Tensor:
    """Return sums of consecutive rows of ``places``, one from each of ``starts`` on."""
    at, begin = torch.from_numpy(places), torch.from_numpy(starts)
    sums: Tensor = torch.embedding_bag(rows, at, begin, scale_grad_by_freq=False, mode=0)[0]
    return sums


def put(rows: Tensor, places: Places, values: Tensor) -> None:
    """Replace some rows of a contiguous ``(rows, width)``."""
    kind = np.dtype((np.void, rows.shape[1] * rows.itemsize))  # copies whole rows
    there, given = (each.contiguous().numpy().view(kind)[:, 0] for each in (rows, values))
    np.put(there, places, given)


class Buffers:
    """Pool of result buffers; a buffer is reused after the last reference to its result is gone.

    Page faults of new memory cost several times the copy into it.
    """

    _MOST = 4  # buffers that are kept

    def __init__(self) -> None:
        self._kept: list[tuple[Bytes, weakref.ref[Bytes]]] = []

    def take(self, rows: Tensor, places: Places) -> Tensor:
        """Return a copy of some rows, as the function ``take``."""
        if not len(places):
            return take(rows, places)
        num_bytes = len(places) * rows.shape[1] * rows.itemsize
        free = (i for i, (memory, user) in enumerate(self._kept) if user() is None)
        fits = (i for i in free if len(self._kept[i][0]) >= num_bytes)
        number = next(fits, None)
        memory = np.empty(num_bytes, np.uint8) if number is None else self._kept.pop(number)[0]
        view = memory[:num_bytes]  # a tensor of this memory keeps a reference to it
        self._kept = [(memory, weakref.ref(view)), *self._kept[: self._MOST - 1]]
        found = torch.from_numpy(view).view(rows.dtype).view(len(places), rows.shape[1])
        return torch.index_select(rows, 0, torch.from_numpy(places), out=found)


class RowSums:
    """Sums of the values of each row, in chunks; values of a row are added in order."""

    def __init__(self, keys: Places, values: Tensor) -> None:
        """Sum ``values`` at the places in ``keys``, which may have any order."""
        keys = np.sort(keys)
        rows, self._places, self._values = rows_of(keys), places_of(keys), values
        self._starts = np.append(np.flatnonzero(np.diff(rows, prepend=-1)), len(rows))
        self.rows = rows[self._starts[:-1]]  # distinct, in order
        self.factor = 1.0  # of the sums

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, part: slice) -> Tensor:
        """Return the sums of a part of ``rows``, ``(rows, dim)``."""
        starts = self._starts[part.start : part.stop + 1]
        places = self._places[starts[0] : starts[-1]]
        is_taken = len(places) == len(starts) - 1  # each row once
        sums = (
            take(self._values, places)
            if is_taken
            else bag_sums(self._values, places, starts[:-1] - starts[0])
        )
        return sums if self.factor == 1.0 else sums.mul_(self.factor)

    def all(self) -> Tensor:
        """Return all sums."""
        return self.of(slice(0, len(self)))

    def chunks(self) -> Sequence[slice]:
        """Divide ``rows`` into parts of ``CHUNK_BYTES``."""
        size = max(1, CHUNK_BYTES // (self._values.shape[1] * self._values.itemsize))
        return [slice(at, min(at + size, len(self))) for at in range(0, len(self), size)]
