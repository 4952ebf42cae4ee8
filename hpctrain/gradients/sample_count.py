"""Sample counts of ranks: the only place that decides a factor of a gradient."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hpctrain.core.errors import ConfigError

NUM_FLAGS = 4  # bits that ranks may raise in a step


class SampleCount:
    """The weight of this rank's gradient, and the sum of all ranks' weights.

    Each rank's gradient is a mean over its own samples. The mean over all samples is
    sum(w_r g_r) / sum(w_r) with w_r = n_r / nominal: buckets are multiplied by w_r while they are
    filled, and divided by the sum while it is written back. The sum rides in the opening message
    of each step, which is there before the first bucket needs it.
    Until a count is set every weight is 1, and only the division by the number of ranks remains.
    A part of the division may be done before the sum, where a sum of 16 bits could overflow.
    """

    def __init__(self, *, average: bool = True, predivide: float = 1.0) -> None:
        """Count every rank alike; weights are divided by ``predivide``, and the sum multiplied."""
        self.average = average  # whether the sum is divided at all
        self.weight = self.nominal = 1.0
        self.is_set = False  # whether the weight follows from a number of samples
        self.total_weight = 1.0  # the sum over all ranks, of the opening message
        self._predivide = predivide

    def set(self, num_samples: float, nominal: float, parameters: Iterable[Tensor] = ()) -> None:
        """Let this rank's gradient count as the mean over ``num_samples``; see ``check_count``."""
        check_count(num_samples, nominal, parameters)
        self.weight, self.nominal = num_samples / nominal, nominal
        self.is_set = True

    @property
    def factor(self) -> float:
        """Factor of this rank's gradient, before the sum."""
        return self.weight / self._predivide if self.average else 1.0

    @property
    def scale(self) -> float | None:
        """Factor of the sum, if any."""
        if not self.average:
            return None
        return self._predivide / (self.total_weight or 1.0)  # no samples: gradients are zeros


def check_count(num_samples: float, nominal: float, parameters: Iterable[Tensor] = ()) -> None:
    """Raise ``ConfigError`` unless the count is not negative, the nominal one positive.

    Parameters of float16 need a nominal count: ``num_samples`` times a gradient may overflow.
    """
    try:
        is_valid = 0 <= num_samples < math.inf and 0 < nominal < math.inf
        is_valid = is_valid and num_samples / nominal < math.inf
    except (TypeError, OverflowError):  # not a number, or beyond float64
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"a sample count must be at least 0, its nominal value positive and the ratio finite, "
            f"got num_samples={num_samples!r}, nominal={nominal!r}"
        )
    if nominal == 1 < num_samples and any(p.dtype is torch.float16 for p in parameters):
        raise ConfigError(
            f"float16 parameters need the usual sample count, since num_samples / nominal "
            f"multiplies their gradients, got {num_samples=}, nominal=1; call "
            f"set_num_samples({num_samples:g}, nominal=N) with the same N on every rank"
        )


def bits_of(flags: int) -> list[int]:
    """Return flags as ``NUM_FLAGS`` numbers, which ranks add up."""
    return [flags >> bit & 1 for bit in range(NUM_FLAGS)]


def flags_of(totals: Sequence[float]) -> int:
    """Return the flags that any rank had, from the sums of ``bits_of``."""
    return sum(1 << bit for bit, ranks in enumerate(totals) if ranks)
