"""Operations on rows of a table: keys, copies, and sums by row.

A key is an integer that contains the number of a row and a place. The place is the index of a
vector of this row in a tensor of shape ``(places, dim)``. Sorting keys groups the places by row.
"""

import weakref
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Places: TypeAlias = NDArray[np.int64]
"""1-D array of row numbers, keys or places."""
Bytes: TypeAlias = NDArray[np.uint8]

CHUNK_BYTES = 1 << 20
"""Bytes of rows that are processed at once; they fit into the cache of a core."""
_PLACE_BITS = 32
_PLACES = (1 << _PLACE_BITS) - 1


def keys_of(rows: Places, places: Places | int) -> Places:
    """Return the keys of pairs of a row and a place; keys sort by row, then by place."""
    return (rows << _PLACE_BITS) | places


def rows_of(keys: Places) -> Places:
    """Return the row numbers that are encoded in keys."""
    return keys >> _PLACE_BITS


def places_of(keys: Places) -> Places:
    """Return the places that are encoded in keys."""
    return keys & _PLACES


def keys_at(rows: Places, first: int = 0) -> Places:
    """Return the keys of rows whose values are stored consecutively, from place ``first`` on."""
    return keys_of(rows, np.arange(first, first + len(rows)))


def take(rows: Tensor, places: Places) -> Tensor:
    """Return a copy of the rows at ``places``, ``(len(places), width)``."""
    if rows.dtype is torch.float32 and len(places):  # faster, since embedding_bag prefetches rows
        return bag_sums(rows, places, np.arange(len(places)))
    return rows.index_select(0, torch.from_numpy(places))


def bag_sums(rows: Tensor, places: Places, starts: Places) -> Tensor:
    """Return sums of rows: sum i adds the rows at ``places[starts[i]:starts[i + 1]]``."""
    at, begin = torch.from_numpy(places), torch.from_numpy(starts)
    sums: Tensor = torch.embedding_bag(rows, at, begin, scale_grad_by_freq=False, mode=0)[0]
    return sums


def put(rows: Tensor, places: Places, values: Tensor) -> None:
    """Write ``values`` to ``rows[places]``; ``rows`` is contiguous with shape ``(n, width)``."""
    # With a dtype of the size of a row, np.put copies whole rows.
    kind = np.dtype((np.void, rows.shape[1] * rows.itemsize))
    there, given = (each.contiguous().numpy().view(kind)[:, 0] for each in (rows, values))
    np.put(there, places, given)


class Buffers:
    """Pool of result buffers; a buffer is reused after its last result was deleted.

    Without the pool, page faults of new memory would take several times as long as the copy.
    """

    _MOST = 4  # buffers in the pool

    def __init__(self) -> None:
        self._kept: list[tuple[Bytes, weakref.ref[Bytes]]] = []

    def take(self, rows: Tensor, places: Places) -> Tensor:
        """Return a copy of the rows at ``places`` in a buffer of the pool."""
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
    """Sums of the values of each row, computed in chunks; values are added in order of place.

    Args:
        keys: keys that contain each row and the places of its values, in any order.
        values: ``(places, dim)``.
    """

    def __init__(self, keys: Places, values: Tensor) -> None:
        keys = np.sort(keys)
        rows, self._places, self._values = rows_of(keys), places_of(keys), values
        self._starts = np.append(np.flatnonzero(np.diff(rows, prepend=-1)), len(rows))
        self.rows = rows[self._starts[:-1]]  # distinct and sorted
        self.factor = 1.0  # multiplies the sums

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, part: slice) -> Tensor:
        """Return the sums of ``rows[part]``, ``(part.stop - part.start, dim)``."""
        starts = self._starts[part.start : part.stop + 1]
        places = self._places[starts[0] : starts[-1]]
        is_taken = len(places) == len(starts) - 1  # one value per row
        sums = (
            take(self._values, places)
            if is_taken
            else bag_sums(self._values, places, starts[:-1] - starts[0])
        )
        return sums if self.factor == 1.0 else sums.mul_(self.factor)

    def all(self) -> Tensor:
        """Return the sums of all ``rows``."""
        return self.of(slice(0, len(self)))

    def chunks(self) -> Sequence[slice]:
        """Return slices of ``rows`` of at most ``CHUNK_BYTES``."""
        size = max(1, CHUNK_BYTES // (self._values.shape[1] * self._values.itemsize))
        return [slice(at, min(at + size, len(self))) for at in range(0, len(self), size)]


class RowOwners:
    """Assignment of rows to ranks, and the ranks with which this rank exchanges rows.

    Owners are the ranks in the order of their nodes, so that the rows of a node are one range:
    owner i is rank ``ranks[i]``.

    Args:
        num_rows: number of rows of the table.
        nodes: the ranks of each node.
        rank: this rank.
    """

    def __init__(self, num_rows: int, nodes: Sequence[Sequence[int]], rank: int) -> None:
        self.num_rows = num_rows
        self.ranks = [each for node in nodes for each in node]  # rank of each owner
        self.here = next(node for node in nodes if rank in node)
        """The ranks of this node."""
        self.local_rank = self.here.index(rank)
        self.per_rank = -(-num_rows // len(self.ranks))
        first = self.ranks.index(self.here[0])
        self.first_on_node = first * self.per_rank
        self.start, self.stop = self.range_of(first + self.local_rank)
        places = [(node, local) for node in nodes for local in range(len(node))]
        self.partners = [
            owner
            for owner, (node, local) in enumerate(places)
            if (local if node == self.here else local % len(self.here)) == self.local_rank
        ]
        """Owners with which this rank exchanges rows for its node: this rank, and a fixed part of
        the owners on each other node."""

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return len(self.here)

    @property
    def size(self) -> int:
        """Number of rows that this rank owns."""
        return self.stop - self.start

    def range_of(self, owner: int) -> tuple[int, int]:
        """Return the first row of ``owner``, and one past its last row."""
        first = owner * self.per_rank
        return min(first, self.num_rows), min(first + self.per_rank, self.num_rows)

    def keys_for(self, parts: Sequence[Places], owner: int) -> Places:
        """Return the keys in ``parts``, sorted arrays, of the rows that ``owner`` stores."""
        bounds = keys_of(np.array(self.range_of(owner)), 0)
        return np.concatenate([keys[slice(*np.searchsorted(keys, bounds))] for keys in parts])
