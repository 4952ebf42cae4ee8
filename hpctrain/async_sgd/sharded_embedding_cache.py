"""Copies of frequently read rows of other nodes."""

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers: TypeAlias = NDArray[np.int64]
_DECAY = 0.99  # of scores, at each lookup of other rows
_NEVER = -(1 << 62)


class CacheReport(NamedTuple):
    """Counters of lookups, hits and saved bytes of a cache."""

    lookups: int
    """Rows of other nodes that were read, once for each node and lookup."""
    hits: int
    """Reads of rows that had a copy."""
    bytes_saved: int
    """Bytes of ids and rows that hits did not send."""

    @property
    def hit_rate(self) -> float:
        """Fraction of lookups that were hits; 0 before the first lookup."""
        return self.hits / max(self.lookups, 1)


class RowCache:
    """A direct-mapped cache of rows, which expire after some steps. Local.

    Rows that are equal modulo the size of the cache have one place. A row remains while its score
    is at least 1: each of its lookups adds 1, and each lookup of another row of its place reduces
    it.

    Source of the score: Lee et al. 2001, IEEE Trans. Computers 50 (recency and frequency).
    """

    clock = 0
    """Steps begun since the table was made."""

    def __init__(self, num_rows: int, max_age: int, dim: int, dtype: torch.dtype) -> None:
        self._max_age, self._row_bytes = max_age, 8 + dim * dtype.itemsize  # of number and row
        self._rows = np.full(max(num_rows, 1), -1)  # by place
        self._fetched, self._scores = np.full_like(self._rows, _NEVER), np.zeros(len(self._rows))
        self._values = torch.empty(num_rows, dim, dtype=dtype)
        self.report, self._versions = CacheReport(0, 0, 0), list[float]()

    def find(self, rows: Numbers, versions: list[float], *, exact: bool) -> NDArray[np.bool_]:
        """Return a mask of the rows that have a valid copy; ``rows`` are distinct.

        Copies from before the last change of ``versions`` are not valid, and with ``exact`` copies
        of earlier steps.
        """
        if versions != self._versions:
            self._versions = versions
            self._fetched.fill(_NEVER)
        places = rows % len(self._rows)
        is_new = self._fetched[places] >= self.clock - (0 if exact else self._max_age)
        is_hit: NDArray[np.bool_] = is_new & (self._rows[places] == rows)
        hits = int(is_hit.sum())
        now = len(rows), hits, hits * self._row_bytes
        self.report = CacheReport(*map(sum, zip(self.report, now, strict=True)))
        return is_hit

    def join(self, rows: Numbers, is_hit: NDArray[np.bool_], fetched: Tensor) -> Tensor:
        """Return the values of all rows, and copy some of the fetched rows to the cache."""
        if not len(self._values):
            return fetched
        places, scores = rows % len(self._rows), self._scores
        values = fetched.new_empty(len(rows), fetched.shape[1])
        values[torch.from_numpy(is_hit)] = self._values[torch.from_numpy(places[is_hit])]
        values[torch.from_numpy(~is_hit)] = fetched
        is_kept = self._rows[places] == rows
        scores[places[is_kept]] += 1
        scores[places[~is_kept]] *= _DECAY
        # Of several rows for a place the last one remains: rotate, so that each can be last.
        new = np.roll(np.flatnonzero(~is_kept & (scores[places] < 1)), self.report.lookups)
        self._rows[places[new]], scores[places[new]] = rows[new], 1
        came = np.flatnonzero((self._rows[places] == rows) & ~is_hit)  # one for each place
        self._fetched[places[came]] = self.clock
        self._values[torch.from_numpy(places[came])] = values[torch.from_numpy(came)]
        return values
