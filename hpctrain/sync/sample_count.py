"""How much each rank's gradient counts: the only place that decides a factor of a gradient."""

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import ConfigError, MismatchError


class SampleCount:
    """The weight of this rank's gradient, and the sum of all ranks' weights.

    Each rank's gradient is a mean over its own samples. The mean over all samples is
    sum(w_r g_r) / sum(w_r) with w_r = n_r / nominal: buckets are multiplied by w_r while they are
    filled, and divided by the sum while it is written back. The sum rides in the first message.
    Until a count is set every weight is 1, and only the division by the number of ranks remains.
    """

    def __init__(self, comm: Communicator) -> None:
        self.weight = 1.0
        self._comm = comm
        self._is_set = False
        self._message = comm.new_bucket(2, torch.float64)

    def set(self, num_samples: float, nominal: float) -> None:
        """Let this rank's gradient count as the mean over ``num_samples``.

        Raises:
            ConfigError: the count is negative or the nominal count is not positive.
        """
        if num_samples < 0 or nominal <= 0:
            raise ConfigError(
                f"a sample count is at least 0 and its nominal value above 0, "
                f"got num_samples={num_samples}, nominal={nominal}"
            )
        self.weight = num_samples / nominal
        self._is_set = True

    def sum_over_ranks(self) -> float:
        """Return the sum of all weights. Collective.

        Raises:
            MismatchError: some ranks have set a count and some have not; on every rank.
        """
        flat = self._message.flat
        flat[0], flat[1] = self.weight, float(self._is_set)
        self._comm.allreduce_(self._message).wait()
        total, num_set = flat.tolist()
        if num_set not in (0, self._comm.size):
            raise MismatchError(
                f"set_num_samples must be called by all ranks or by none, {num_set:.0f} of "
                f"{self._comm.size} have called it; call it on every rank, in every step"
            )
        return (
            float(total) if total > 0 else 1.0
        )  # no samples at all: the sum of gradients is zero
