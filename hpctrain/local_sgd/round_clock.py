"""Times of a local method, and the decision when the ranks synchronize."""

import math
import time


class RoundClock:
    """Measures the steps and the communication of a rank, and decides when ranks synchronize.

    The ranks synchronize when replicas are averaged and in synchronous steps. In between, a
    separate message, at most about ``within_s`` after the last synchronization, sends the flags of
    a rank to the other ranks.
    """

    def __init__(self) -> None:
        self.within_s = math.inf
        """Approximate limit of the time between two synchronizations, in seconds."""
        self.must_synchronize = False
        """Whether the ranks synchronize after the next step; the same on every rank."""
        self.has_synchronized = True
        """Whether the ranks have synchronized in the last step."""
        self.waited_s = 0.0
        """Seconds that this rank has spent on communication since the last average began."""
        self.round_s = 0.0
        """Mean over ranks of ``waited_s`` when the last average began; same on all ranks."""
        self._last_sync, self._steps_between = 0, 1
        self._num_timed, self._timed_s = 0, 0.0
        self.resume()

    def resume(self) -> None:
        """Start the measurement of the next step."""
        self._started = time.perf_counter()

    def is_due(self, step: int, *, busy: bool) -> bool:
        """Return whether the ranks must synchronize by a message after ``step``.

        Args:
            step: number of steps that this rank has taken.
            busy: whether replicas are in flight; a message would wait for the replicas.
        """
        since = step - self._last_sync
        soon = self.within_s < math.inf and since >= self._steps_between
        return not self.has_synchronized and (self.must_synchronize or (soon and not busy))

    def count_step(self, step: int, *, synchronous: bool) -> None:
        """Record the end of ``step``; if ``synchronous``, all ranks averaged its gradients."""
        self.has_synchronized = synchronous
        if synchronous:
            self._last_sync = step
        self._num_timed += 1
        self._timed_s += time.perf_counter() - self._started

    @property
    def step_s(self) -> float:
        """Mean seconds of a step since the last synchronization, without communication."""
        return self._timed_s / max(self._num_timed, 1)

    def record_sync(self, step: int, step_s: float, round_s: float | None) -> None:
        """Record a synchronization after ``step``.

        Args:
            step: step of this rank.
            step_s: mean over ranks of ``step_s``.
            round_s: mean over ranks of ``waited_s``; None if replicas are not averaged.
        """
        self.has_synchronized, self.must_synchronize, self._last_sync = True, False, step
        self._num_timed, self._timed_s = 0, 0.0
        if round_s is not None:
            self.waited_s, self.round_s = 0.0, round_s
        if self.within_s < math.inf and step_s > 0:
            self._steps_between = max(1, int(self.within_s / step_s))

    def restart(self, step: int) -> None:
        """Continue after a state was loaded, with the same parameters on all ranks."""
        self._last_sync = step
        self.resume()
