"""How much each rank's gradient counts: the only place that decides a factor of a gradient.

Flags ride in the same message: what any rank wants done after the step, all ranks know.
"""

import math
from collections.abc import Sequence

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import ConfigError, MismatchError

NUM_FLAGS = 4
"""Bits that ranks may raise in a step."""


class SampleCount:
    """The weight of this rank's gradient, and the sum of all ranks' weights.

    Each rank's gradient is a mean over its own samples. The mean over all samples is
    sum(w_r g_r) / sum(w_r) with w_r = n_r / nominal: buckets are multiplied by w_r while they are
    filled, and divided by the sum while it is written back. The sum rides in the opening message
    of each step, which is there before the first bucket needs it.
    Until a count is set every weight is 1, and only the division by the number of ranks remains.
    A part of the division may be done before the sum, where a sum of 16 bits could overflow.
    """

    def __init__(self, comm: Communicator, *, predivide: float = 1.0) -> None:
        """Make the opening message. Collective.

        Args:
            comm: the ranks.
            predivide: weights are divided by it before the sum, and the sum's factor is
                multiplied by it.
        """
        self.weight = 1.0
        self.flags = 0
        """Bits of this rank in the opening message of each step."""
        self.raised_flags = 0
        """Bits that any rank had in the last opening message; the same on every rank."""
        self.has_new_sparse = False
        """Whether any rank had a new sparse gradient in it; the same on every rank."""
        self.scale = 1.0
        """The factor of the sum, after ``exchange``."""
        self._predivide = predivide
        self._comm = comm
        self._is_set = False
        self._message = comm.new_bucket(4 + NUM_FLAGS, torch.float64)

    def set(self, num_samples: float, nominal: float) -> None:
        """Let this rank's gradient count as the mean over ``num_samples``.

        Raises:
            ConfigError: the count is negative, the nominal count not positive, or one not finite.
        """
        check_count(num_samples, nominal)
        self.weight = num_samples / nominal
        self._is_set = True

    @property
    def factor(self) -> float:
        """Factor of this rank's gradient, before the sum."""
        return self.weight / self._predivide

    def exchange(self, *, outdated: bool, new_sparse: bool) -> None:
        """Send the opening message of a step: ``scale`` is known from then on. Collective.

        Args:
            outdated: this rank's parameters are no longer those that the buckets were laid for.
            new_sparse: this rank has a sparse gradient where none was so far.

        Raises:
            MismatchError: some ranks have set a count and some have not, or only some are
                outdated; on every rank.
        """
        flat = self._message.flat
        own = (self.weight, self._is_set, outdated, new_sparse, *bits_of(self.flags))
        flat.copy_(torch.tensor(own, dtype=torch.float64))
        self._comm.allreduce_(self._message).wait()
        total, num_set, num_outdated, num_new_sparse, *raised = flat.tolist()
        self.has_new_sparse = num_new_sparse > 0
        self.raised_flags = flags_of(raised)
        size = self._comm.size
        if num_set not in (0, size):
            raise MismatchError(
                f"set_num_samples must be called by all ranks or by none, {num_set:.0f} of {size} "
                f"have called it; call it on every rank, in every step"
            )
        if num_outdated not in (0, size):
            raise MismatchError(
                f"parameters must change on all ranks in the same step, they have changed on "
                f"{num_outdated:.0f} of {size}: added, frozen, another dtype or layout"
            )
        self.scale = self._predivide / (total or 1.0)  # no samples at all: gradients are zeros


def check_count(num_samples: float, nominal: float) -> None:
    """Raise ``ConfigError`` unless the count is not negative, the nominal one positive."""
    if not (0 <= num_samples < math.inf and 0 < nominal < math.inf):
        raise ConfigError(
            f"a sample count is at least 0 and its nominal value above 0, "
            f"got num_samples={num_samples}, nominal={nominal}"
        )


def bits_of(flags: int) -> list[int]:
    """Return flags as ``NUM_FLAGS`` numbers, which ranks add up."""
    return [flags >> bit & 1 for bit in range(NUM_FLAGS)]


def flags_of(totals: Sequence[float]) -> int:
    """Return the flags that any rank had, from the sums of ``bits_of``."""
    return sum(1 << bit for bit, ranks in enumerate(totals) if ranks)
