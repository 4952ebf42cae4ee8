"""Detector of loss spikes: a loss far above the last ones, by median and absolute deviations."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from hpctrain.core.checks import Number, Positive, checked

_TO_SIGMA = 1.4826  # of a normal distribution, over its median absolute deviation
_LEAST = 0.01  # of the median: a loss that hardly changes has no deviations to speak of


class LossSpikes:
    """Tells a loss that is no longer one of a training that goes well.

    A spike lies more than ``deviations`` standard deviations above the median of the last losses.
    The deviation is estimated by the median absolute one, which spikes hardly move, and counts as
    1 % of the median at least. Before half a ``window`` of losses is known, nothing is a spike.

    Give it the same loss on every rank, such as ``optimizer.mean_loss``, and all decide alike.
    """

    def __init__(self, deviations: float = 6.0, window: int = 64) -> None:
        """Begin without losses; ``ConfigError`` unless both arguments are above 0."""
        checked("deviations", deviations, Positive)
        checked("window", window, Number)
        self._deviations = deviations
        self._losses: deque[float] = deque(maxlen=window)

    @property
    def limit(self) -> float:
        """Largest loss that is no spike; infinite while too few are known."""
        if 2 * len(self._losses) < (self._losses.maxlen or 0):
            return math.inf
        median = statistics.median(self._losses)
        spread = statistics.median(abs(loss - median) for loss in self._losses)
        return median + self._deviations * max(_TO_SIGMA * spread, _LEAST * abs(median))

    def is_spike(self, loss: float) -> bool:
        """Say whether a loss is a spike; one that is not finite is."""
        return not math.isfinite(loss) or loss > self.limit

    def see(self, loss: float) -> None:
        """Remember the loss of a step that was taken; one that is not finite is left out."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return all that it remembers: a few numbers."""
        return {"losses": [*self._losses]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._losses.clear()
        self._losses.extend(state["losses"])
