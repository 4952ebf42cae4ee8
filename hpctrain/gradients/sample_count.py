"""Weights of the ranks' gradients by numbers of samples.

All factors of gradients are computed in this module.
"""

import math
from collections.abc import Sequence

from hpctrain.core.errors import ConfigError

NUM_FLAGS = 4  # number of flags that ranks can raise in a step
MOST_EXPONENT = 60  # largest exponent of a weight, so that sums of ``peak_of`` fit float64
_SPREAD = 16


class SampleCount:
    """Computes the factors of gradients from the numbers of samples of the ranks.

    The gradient g_r of rank r is a mean over n_r samples. The mean over the samples of all ranks
    is sum(w_r g_r) / sum(w_r) with the weights w_r = n_r / nominal. Until a count is set, every
    weight is 1, and the sum is divided by the number of ranks.

    No gradient is multiplied by more than 1, because a 16-bit product could overflow. Therefore
    all weights are divided by 2^K, the smallest power of two that is at least the largest weight.
    K and sum(w_r) are known after the agreement of a step, which precedes the first sum, but not
    when buckets are filled. So there are three factors:

    - while a rank fills a bucket: w_r / 2^k, where 2^k is the smallest power of two that is at
      least w_r;
    - before the sum, on ranks with k < K: 2^(k - K);
    - after the sum: 2^K / sum(w_r).

    Args:
        average: whether the sum of gradients is divided by the sum of weights.
        predivide: number by which weights are divided, and by which the sum is multiplied.
    """

    def __init__(self, *, average: bool = True, predivide: float = 1.0) -> None:
        self.average = average
        self.weight = self.nominal = 1.0
        self.is_set = False  # whether ``set`` was called
        self.total_weight = 1.0  # sum over all ranks, from the agreement
        self.exponent = 0  # K, from the agreement
        self._predivide = predivide

    def set(self, num_samples: float, nominal: float) -> None:
        """Set the weight of this rank's gradient, which is a mean over ``num_samples``.

        Raises:
            ConfigError: a number is not valid; see ``check_count``.
        """
        check_count(num_samples, nominal)
        self.weight, self.nominal = num_samples / nominal, nominal
        self.is_set = True

    @property
    def factor(self) -> float:
        """Factor of this rank's gradient when the bucket is filled, before the agreement."""
        return self.factor_of(self.weight, exponent_of(self.weight))

    @property
    def rest(self) -> float:
        """Additional factor of this rank's gradient after the agreement: 2^-n with n >= 0."""
        is_known = not self.average or not self.weight
        return 1.0 if is_known else 2.0 ** (exponent_of(self.weight) - self.exponent)

    def factor_of(self, weight: float, exponent: int) -> float:
        """Return the factor of a gradient before the sum; weights are divided by 2^exponent."""
        return math.ldexp(weight, -exponent) / self._predivide if self.average else 1.0

    @property
    def scale(self) -> float | None:
        """Factor of the sum of all gradients; None for no factor."""
        return self.scale_of(self.exponent)

    def scale_of(self, exponent: int) -> float | None:
        """Return the factor for a sum whose weights were divided by 2^exponent, or None."""
        if not self.average:
            return None
        total = self.total_weight or 1.0  # without samples, all gradients are zero
        return self._predivide / math.ldexp(total, -exponent)


def exponent_of(weight: float) -> int:
    """Return the exponent of the smallest power of two that is at least ``weight``; 0 for 0."""
    mantissa, exponent = math.frexp(weight)
    return max(exponent - (mantissa == 0.5), -MOST_EXPONENT)


def peak_of(weight: float) -> float:
    """Encode a weight so that ``exponent_of_peaks`` can decode the sum of the ranks' codes."""
    return 2.0 ** (_SPREAD * exponent_of(weight)) if weight else 0.0


def exponent_of_peaks(peaks: float) -> int:
    """Return the maximum over the ranks of ``exponent_of(weight)``.

    ``peaks`` is the sum over the ranks of ``peak_of(weight)``.

    The result is exact on up to 2^16 ranks, and at most 1 too large on up to 2^32 ranks.
    """
    return (math.frexp(peaks)[1] - 1) // _SPREAD if peaks else 0


def check_count(num_samples: float, nominal: float) -> None:
    """Raise ``ConfigError`` unless both numbers, and their ratio, are in the valid range."""
    try:
        is_valid = 0 <= num_samples < math.inf and 0 < nominal < math.inf
        is_valid = is_valid and num_samples / nominal <= 2.0**MOST_EXPONENT
    except (TypeError, OverflowError):  # not a number, or beyond float64
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"a sample count must be at least 0, its nominal value positive and the ratio at most "
            f"2^{MOST_EXPONENT}, got num_samples={num_samples!r}, nominal={nominal!r}; pass the "
            f"number of samples of this rank"
        )


def bits_of(flags: int) -> list[int]:
    """Return the bits of ``flags`` as ``NUM_FLAGS`` numbers, which are summed over the ranks."""
    return [flags >> bit & 1 for bit in range(NUM_FLAGS)]


def flags_of(totals: Sequence[float]) -> int:
    """Return the bits that any rank has set, given the sums of ``bits_of`` over ranks."""
    return sum(1 << bit for bit, ranks in enumerate(totals) if ranks)
