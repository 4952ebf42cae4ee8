"""Cache of frequently read rows of other nodes."""

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers: TypeAlias = NDArray[np.int64]
_DECAY = 0.99  # factor of a score when another row of the same place is looked up
_NEVER = -(1 << 62)


class CacheReport(NamedTuple):
    """Counters of lookups, hits and saved bytes of a cache."""

    lookups: int
    """Rows of other nodes that were read; a row counts once per node and lookup."""
    hits: int
    """Rows that were found in the cache."""
    bytes_saved: int
    """Bytes of ids and rows that were not sent because of hits."""

    @property
    def hit_rate(self) -> float:
        """Fraction of lookups that were hits; 0 before the first lookup."""
        return self.hits / max(self.lookups, 1)


class RowCache:
    """Direct-mapped cache of rows that expire after ``max_age`` steps. Local.

    Rows with equal numbers modulo ``num_rows`` share a place. A row keeps its place while its
    score is at least 1: each lookup of the row adds 1, and each lookup of another row of the place
    reduces the score.

    Args:
        num_rows: size of the cache; 0 disables it.
        max_age: steps after which a row expires.
        dim: elements of a row.
        dtype: dtype of the rows.

    Source of the score: Lee et al. 2001, IEEE Trans. Computers 50 (recency and frequency).
    """

    clock = 0
    """Steps that the table has begun."""

    def __init__(self, num_rows: int, max_age: int, dim: int, dtype: torch.dtype) -> None:
        self._max_age, self._row_bytes = max_age, 8 + dim * dtype.itemsize  # row number and row
        self._rows = np.full(max(num_rows, 1), -1)  # row number by place
        self._fetched, self._scores = np.full_like(self._rows, _NEVER), np.zeros(len(self._rows))
        self._values = torch.empty(num_rows, dim, dtype=dtype)
        self.report, self._versions = CacheReport(0, 0, 0), list[float]()

    def find(self, rows: Numbers, versions: list[float], *, exact: bool) -> NDArray[np.bool_]:
        """Return a mask: True for the rows that have a valid copy.

        Args:
            rows: distinct row numbers.
            versions: ``NodeRows.version`` of each rank; all copies are discarded if any version
                has changed.
            exact: whether copies that were fetched in earlier steps are invalid.
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
        """Return the values of ``rows``, and cache some of the fetched rows.

        Args:
            rows: distinct row numbers.
            is_hit: result of ``find``.
            fetched: ``(misses, dim)``, values of the rows that were not found, in their order.
        """
        if not len(self._values):
            return fetched
        places, scores = rows % len(self._rows), self._scores
        values = fetched.new_empty(len(rows), fetched.shape[1])
        values[torch.from_numpy(is_hit)] = self._values[torch.from_numpy(places[is_hit])]
        values[torch.from_numpy(~is_hit)] = fetched
        is_kept = self._rows[places] == rows
        scores[places[is_kept]] += 1
        scores[places[~is_kept]] *= _DECAY
        # If several rows share a place, the last row is stored. The rotation varies which is last.
        new = np.roll(np.flatnonzero(~is_kept & (scores[places] < 1)), self.report.lookups)
        self._rows[places[new]], scores[places[new]] = rows[new], 1
        came = np.flatnonzero((self._rows[places] == rows) & ~is_hit)  # one row per place
        self._fetched[places[came]] = self.clock
        self._values[torch.from_numpy(places[came])] = values[torch.from_numpy(came)]
        return values
