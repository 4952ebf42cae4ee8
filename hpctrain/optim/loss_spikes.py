"""``LossSpikes``, which detects losses far above the recent losses."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from hpctrain.core.checks import Number, Positive, checked

_TO_SIGMA = 1.4826  # standard deviation / median absolute deviation of a normal distribution
_LEAST = 0.01  # smallest deviation as a fraction of the median, for a constant loss


class LossSpikes:
    """Detects losses that are far above the recent losses.

    A spike is more than ``deviations`` standard deviations above the median of the last ``window``
    losses. The standard deviation is estimated from the median absolute deviation, on which spikes
    have little influence, and is at least 1 % of the median. Until ``window / 2`` losses are
    recorded, no finite loss is a spike.

    All ranks must pass the same loss, such as ``optimizer.mean_loss``, to make the same decision.

    Args:
        deviations: distance of a spike from the median, in standard deviations; above 0.
        window: number of recent losses; above 0.

    Raises:
        ConfigError: an argument is not valid.
    """

    def __init__(self, deviations: float = 6.0, window: int = 64) -> None:
        checked("deviations", deviations, Positive)
        checked("window", window, Number)
        self._deviations = deviations
        self._losses: deque[float] = deque(maxlen=window)

    @property
    def limit(self) -> float:
        """Largest loss that is not a spike; infinite while too few losses are known."""
        if 2 * len(self._losses) < (self._losses.maxlen or 0):
            return math.inf
        median = statistics.median(self._losses)
        spread = statistics.median(abs(loss - median) for loss in self._losses)
        return median + self._deviations * max(_TO_SIGMA * spread, _LEAST * abs(median))

    def is_spike(self, loss: float) -> bool:
        """Return whether ``loss`` is a spike; a loss that is not finite is a spike, too."""
        return not math.isfinite(loss) or loss > self.limit

    def see(self, loss: float) -> None:
        """Record the loss of a step; a loss that is not finite is ignored."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the recent losses."""
        return {"losses": [*self._losses]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the recent losses from a result of ``state_dict``."""
        self._losses.clear()
        self._losses.extend(state["losses"])
