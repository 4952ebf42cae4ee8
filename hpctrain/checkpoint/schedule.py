"""Schedule of checkpoints: by steps, by time, or by their cost."""

import statistics
from collections import deque

from hpctrain.core.errors import ConfigError
from hpctrain.core.units import parse_seconds
from hpctrain.cost.failures import daly

_COSTS_KEPT = 5
"""Number of costs whose median gives the interval: one slow write does not change it."""


class CheckpointSchedule:
    """Schedule that decides after which steps one rank saves. Not collective.

    With ``auto``, the first save is immediate and measures the cost, from which the formula of
    Daly gives the interval.

    Args:
        every: as for ``Manager``.
        mtbf_s: mean time between two failures of the whole job; ``"auto"`` needs it.
        now: time in seconds at which the first interval starts.

    Raises:
        ConfigError: ``every`` is invalid, or ``"auto"`` lacks ``mtbf_s``.
    """

    def __init__(self, every: int | str, *, mtbf_s: float | None = None, now: float = 0.0) -> None:
        self._every_steps: int | None = None
        self._every_s: float | None = None
        self._mtbf_s: float | None = None
        self._costs_s: deque[float] = deque(maxlen=_COSTS_KEPT)
        self._write_s = 0.0
        self._last_step = 0
        self._last_s = now
        if isinstance(every, int):
            self._every_steps = every
        elif every == "auto":
            if mtbf_s is None or not mtbf_s > 0:
                raise ConfigError(
                    f"mtbf, the mean time between failures of the job, must be above 0 with "
                    f'every="auto", got {mtbf_s}; pass a time such as "24h", or another every'
                )
            self._mtbf_s = mtbf_s
        elif every != "none":
            self._every_s = parse_seconds(every)
        if (self._every_steps is not None and self._every_steps < 1) or self._every_s == 0:
            raise ConfigError(
                f"every must be at least 1 step or a time above 0 s, got {every!r}; use "
                f'every="none" to write no checkpoints'
            )

    @property
    def by_clock(self) -> bool:
        """Whether ``due`` depends on the clock, which differs between ranks."""
        return self._every_steps is None

    @property
    def interval_s(self) -> float | None:
        """Seconds between checkpoints; None if the schedule uses steps or is not known yet."""
        if self._mtbf_s is None:
            return self._every_s
        if not self._costs_s:
            return None
        cost_s = statistics.median(self._costs_s)
        # Daly's formula gives the time without saves. A save waits for the write of the previous
        # save, so the interval is at least the time of a write.
        return max(daly(cost_s, self._mtbf_s) + cost_s, self._write_s)

    def due(self, step: int, now: float) -> bool:
        """Return whether a checkpoint is due after ``step`` steps, at the time ``now``."""
        if self._every_steps is not None:
            return step // self._every_steps > self._last_step // self._every_steps
        if self._mtbf_s is not None and not self._costs_s:
            return step > self._last_step
        return self.interval_s is not None and now - self._last_s >= self.interval_s

    def taken(self, step: int, now: float) -> None:
        """Record that a checkpoint of ``step`` was started, or loaded, at the time ``now``."""
        self._last_step = step
        self._last_s = now

    def cost(self, stall_s: float, write_s: float) -> None:
        """Record the cost of a checkpoint.

        Both times are maxima over ranks: how long training waited, and how long the write took.
        """
        self._costs_s.append(stall_s)
        self._write_s = write_s
