"""Sample counts of ranks: the only place that decides a factor of a gradient."""

import math
from collections.abc import Sequence

from hpctrain.core.errors import ConfigError

NUM_FLAGS = 4  # bits that ranks may raise in a step
MOST_EXPONENT = 60  # of a weight: sums of peaks stay in the range of float64
_SPREAD = 16


class SampleCount:
    """The weight of this rank's gradient, and the sum of all ranks' weights.

    Each rank's gradient is a mean over its own samples. The mean over all samples is
    sum(w_r g_r) / sum(w_r) with w_r = n_r / nominal. No gradient is multiplied by more than 1,
    since a product of 16 bits could overflow: all weights are divided by 2^K, the least power of
    two not below the largest. A bucket is multiplied by w_r / 2^k, with the rank's own exponent k,
    while it is filled, and by 2^(k - K) before the sum on the ranks with k < K. The result is
    divided by the sum of w_r / 2^K. That sum and K come with the opening message of each step,
    which arrives before the first bucket is summed.
    Until a count is set every weight is 1, and only the division by the number of ranks remains.
    """

    def __init__(self, *, average: bool = True, predivide: float = 1.0) -> None:
        """Count every rank alike; weights are divided by ``predivide``, and the sum multiplied."""
        self.average = average  # whether the sum is divided at all
        self.weight = self.nominal = 1.0
        self.is_set = False  # whether the weight follows from a number of samples
        self.total_weight = 1.0  # the sum over all ranks, of the opening message
        self.exponent = 0  # K, of the opening message
        self._predivide = predivide

    def set(self, num_samples: float, nominal: float) -> None:
        """Let this rank's gradient count as the mean over ``num_samples``; see ``check_count``."""
        check_count(num_samples, nominal)
        self.weight, self.nominal = num_samples / nominal, nominal
        self.is_set = True

    @property
    def factor(self) -> float:
        """Factor of this rank's gradient that is known before the opening message."""
        return self.factor_of(self.weight, exponent_of(self.weight))

    @property
    def rest(self) -> float:
        """Factor that is left after the opening message: a power of two, at most 1."""
        is_known = not self.average or not self.weight
        return 1.0 if is_known else 2.0 ** (exponent_of(self.weight) - self.exponent)

    def factor_of(self, weight: float, exponent: int) -> float:
        """Return the factor of a gradient before the sum, with weights divided by a power of 2."""
        return math.ldexp(weight, -exponent) / self._predivide if self.average else 1.0

    @property
    def scale(self) -> float | None:
        """Factor of the sum of gradients times ``factor_of(weight, exponent)``, if any."""
        return self.scale_of(self.exponent)

    def scale_of(self, exponent: int) -> float | None:
        """Return the factor of a sum whose weights were divided by another power of two."""
        if not self.average:
            return None
        total = self.total_weight or 1.0  # no samples: gradients are zeros
        return self._predivide / math.ldexp(total, -exponent)


def exponent_of(weight: float) -> int:
    """Return the exponent of the least power of two that is not below a weight; 0 of none."""
    mantissa, exponent = math.frexp(weight)
    return max(exponent - (mantissa == 0.5), -MOST_EXPONENT)


def peak_of(weight: float) -> float:
    """Return a number whose sum over ranks has the largest exponent; see ``exponent_of_peaks``."""
    return 2.0 ** (_SPREAD * exponent_of(weight)) if weight else 0.0


def exponent_of_peaks(peaks: float) -> int:
    """Return the largest exponent of some weights from the sum of their peaks.

    It is exact for up to 2^16 ranks, and at most 1 too large for up to 2^32.
    """
    return (math.frexp(peaks)[1] - 1) // _SPREAD if peaks else 0


def check_count(num_samples: float, nominal: float) -> None:
    """Raise ``ConfigError`` unless the count is not negative, the nominal one positive."""
    try:
        is_valid = 0 <= num_samples < math.inf and 0 < nominal < math.inf
        is_valid = is_valid and num_samples / nominal <= 2.0**MOST_EXPONENT
    except (TypeError, OverflowError):  # not a number, or beyond float64
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"a sample count must be at least 0, its nominal value positive and the ratio at most "
            f"2^{MOST_EXPONENT}, got num_samples={num_samples!r}, nominal={nominal!r}"
        )


def bits_of(flags: int) -> list[int]:
    """Return flags as ``NUM_FLAGS`` numbers, which ranks add up."""
    return [flags >> bit & 1 for bit in range(NUM_FLAGS)]


def flags_of(totals: Sequence[float]) -> int:
    """Return the flags that any rank had, from the sums of ``bits_of``."""
    return sum(1 << bit for bit, ranks in enumerate(totals) if ranks)
