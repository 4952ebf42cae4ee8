"""Histogram of the staleness of gradients, and the stability limit of the learning rate."""

import logging
import math
from collections import Counter
from collections.abc import Iterable

from hpctrain.core.checks import Amount, Finite0, checked

_LOG = logging.getLogger(__name__)


def stable_rate(staleness: float, curvature: float = 1.0) -> float:
    """Return the learning rate below which delayed gradient descent on a quadratic is stable.

    The iteration x(t+1) = x(t) - rate * curvature * x(t - staleness) converges below the returned
    rate and diverges above. The rate is 2 / curvature for staleness 0, and approximately
    pi / (2 * staleness * curvature) for large staleness.

    Args:
        staleness: updates between the read of the parameters and the application of the gradient,
            0 or more.
        curvature: the largest eigenvalue of the Hessian.

    Raises:
        ConfigError: ``staleness`` is below 0, ``curvature`` is not above 0, or one is not finite.

    Source: Levin and May 1976, "A note on difference-delay equations", Theor. Popul. Biol. 9.
    """
    checked("curvature", curvature, Amount)
    checked("staleness", staleness, Finite0)
    return 2.0 * math.sin(math.pi / (2.0 * (2.0 * staleness + 1.0))) / curvature


class StalenessHistogram:
    """Counts gradients by staleness; warns once if the learning rate is too large.

    Args:
        curvature: curvature of the loss; None (unknown) disables the warning.
    """

    def __init__(self, curvature: float | None) -> None:
        self.counts: Counter[int] = Counter()
        self._curvature, self._has_warned = curvature, False

    def add(self, staleness: int, rates: Iterable[float]) -> None:
        """Count a step of this staleness; ``rates`` are the learning rates of the step."""
        self.counts[staleness] += 1
        if self._curvature is None or self._has_warned or not staleness:
            return
        most, limit = max(rates, default=0.0), stable_rate(staleness, self._curvature)
        if most > limit:
            self._has_warned = True
            _LOG.warning(
                "the learning rate should be below %.4g, the stability limit of gradients that "
                "are %d updates old on a quadratic of curvature %g, got lr=%g; use a smaller "
                "lr, fewer workers or a smaller staleness",
                *(limit, staleness, self._curvature, most),
            )
