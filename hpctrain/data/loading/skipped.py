"""Samples that a training leaves out because they cannot be read."""

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.samples import Indices


class Skipped:
    """A set of samples as ranges; never changed, so that threads may share it."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """Join ranges ``[start, stop)``, which may overlap and touch."""
        self.ranges: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if self.ranges and start <= self.ranges[-1][1]:
                first, last = self.ranges[-1]
                self.ranges[-1] = (first, max(last, stop))
            else:
                self.ranges.append((start, stop))
        self._bounds = np.array(self.ranges, np.int64).ravel()

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(stop - start for start, stop in self.ranges)

    def joined(self, start: int, stop: int) -> "Skipped":
        """Return these samples and ``[start, stop)``."""
        return Skipped([*self.ranges, (start, stop)])

    def covers(self, start: int, stop: int) -> bool:
        """Say whether all of ``[start, stop)`` is in here."""
        place = bisect_left(self.ranges, (start + 1,))
        return place > 0 and stop <= self.ranges[place - 1][1]

    def holds(self, indices: Indices) -> NDArray[np.bool_]:
        """Say for each index whether it is in here."""
        # Between an odd number of bounds and the next one lies a range.
        inside: NDArray[np.bool_] = np.searchsorted(self._bounds, indices, side="right") % 2 == 1
        return inside
