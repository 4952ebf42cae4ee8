"""Copies of the rows of other nodes that are looked up most often."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.core.errors import ConfigError

_DECAY = 0.99  # of scores, at each lookup of others
_NEVER = -(1 << 62)


class CacheReport(NamedTuple):
    """What copies have saved so far."""

    lookups: int
    """Rows of other nodes that were looked up, each once for each node and lookup."""
    hits: int
    """Those of them of which there was a copy."""
    bytes_saved: int
    """Bytes of ids and rows that did not travel for it."""

    @property
    def hit_rate(self) -> float:
        """Hits for each lookup; 0 before the first."""
        return self.hits / max(self.lookups, 1)


class RowCache:
    """Copies of some rows, each of which counts for so many steps. Not collective.

    As a direct-mapped cache it has one place for all rows that are equal modulo its size. A row
    stays while its score is at least 1: one for each lookup of it, which decays with each lookup
    of others of its place.

    Source of the score: Lee et al. 2001, IEEE Trans. Computers 50 (recency and frequency).
    """

    clock = 0
    """Steps that were begun since the table was made."""

    def __init__(self, num_rows: int, max_age: int, dim: int, dtype: torch.dtype) -> None:
        """Plan for ``num_rows``. Raises ``ConfigError``: it is no such number, or ``max_age``."""
        are_numbers = all(type(num) is int and num >= 0 for num in (num_rows, max_age))
        if not are_numbers or max_age > 0 == num_rows:
            raise ConfigError(
                f"cache_rows and cache_steps are whole numbers of at least 0, and steps those of "
                f"rows, got {num_rows!r} and {max_age!r}; set cache_rows=100_000, or neither"
            )
        self._num_rows, self._max_age, self._dim, self._dtype = num_rows, max_age, dim, dtype
        self._row_bytes = 8 + dim * dtype.itemsize  # of its number and itself
        self.num_bytes = num_rows * (self._row_bytes + 16)
        self.report, self._versions = CacheReport(0, 0, 0), list[float]()

    def make(self) -> None:
        """Make room."""
        self._rows = np.full(max(self._num_rows, 1), -1)  # by place
        self._fetched, self._scores = np.full_like(self._rows, _NEVER), np.zeros(len(self._rows))
        self._values = torch.empty(self._num_rows, self._dim, dtype=self._dtype)

    def find(self, rows: NDArray[np.int64], versions: list[float], *, exact: bool) -> NDArray[Any]:
        """Return of which rows, each once, there are copies that count.

        Those from before the last change of ``versions`` do not, and, where it must be ``exact``,
        those of former steps.
        """
        if versions != self._versions:
            self._versions = versions
            self._fetched.fill(_NEVER)
        self._places = rows % len(self._rows)
        is_new = self._fetched[self._places] >= self.clock - (0 if exact else self._max_age)
        self._is_hit = is_hit = np.asarray(is_new & (self._rows[self._places] == rows))
        num_hits = int(is_hit.sum())
        now = len(rows), num_hits, num_hits * self._row_bytes
        self.report = CacheReport(*map(sum, zip(self.report, now, strict=True)))
        return is_hit

    def join(self, rows: NDArray[np.int64], fetched: Tensor) -> Tensor:
        """Return the values of all rows of ``find``, and keep copies of those that it missed."""
        if not self._num_rows:
            return fetched
        places, is_hit, scores = self._places, self._is_hit, self._scores
        values = fetched.new_empty(len(rows), self._dim)
        values[torch.from_numpy(is_hit)] = self._values[torch.from_numpy(places[is_hit])]
        values[torch.from_numpy(~is_hit)] = fetched
        is_kept = self._rows[places] == rows
        scores[places[is_kept]] += 1
        scores[places[~is_kept]] *= _DECAY
        new = np.flatnonzero(~is_kept & (scores[places] < 1))
        new = np.roll(new, self.report.lookups)  # of several for a place the last one stays
        self._rows[places[new]], scores[places[new]] = rows[new], 1
        came = np.flatnonzero((self._rows[places] == rows) & ~is_hit)  # one for each place
        self._fetched[places[came]] = self.clock
        self._values[torch.from_numpy(places[came])] = values[torch.from_numpy(came)]
        return values
