"""Clocks of the workers of a parameter server, and the smallest of them."""

import math
from collections import Counter
from collections.abc import Mapping


class WorkerClocks:
    """Clocks of the workers that have not settled.

    A clock is the number of gradients that a worker has sent. All operations except the
    constructor take constant time on average, for any number of workers.

    Args:
        clocks: clock of each worker.
    """

    def __init__(self, clocks: Mapping[int, int]) -> None:
        self.by_worker = dict(clocks)
        self._num_at = Counter(self.by_worker.values())  # workers by clock
        self._least = min(self._num_at, default=0)

    def of(self, worker: int) -> float:
        """Return the clock of a worker; inf after it has settled."""
        return self.by_worker.get(worker, math.inf)

    def advance(self, worker: int, clock: int) -> None:
        """Set the clock of a worker, which is at least its previous clock."""
        self.remove(worker)
        self.by_worker[worker] = clock
        self._num_at[clock] += 1

    def remove(self, worker: int) -> None:
        """Exclude a worker that has settled; no-op the second time."""
        if (clock := self.by_worker.pop(worker, None)) is not None:
            self._num_at[clock] -= 1
            if not self._num_at[clock]:
                del self._num_at[clock]

    @property
    def least(self) -> float:
        """The smallest clock; inf if all workers have settled."""
        if not self._num_at:
            return math.inf
        while self._least not in self._num_at:
            self._least += 1
        return self._least

    def num_up_to(self, clock: int) -> int:
        """Return the number of workers whose clock is at most ``clock``."""
        if (least := self.least) == math.inf:
            return 0
        return sum(self._num_at[each] for each in range(int(least), clock + 1))
