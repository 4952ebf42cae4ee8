"""Learning rates for large batches: scaling rules, and inverse time decay."""

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpctrain.core.checks import AtLeast0, Number, checked, require


class InverseTimeLR(LRScheduler):
    """Decays learning rates as ``1 / (1 + decay * step / num_steps)``.

    After ``num_steps`` steps the factor is ``1 / (1 + decay)``. With ``decay=num_steps`` the rate
    of step t, counted from 1, is the initial rate divided by t (Robbins and Monro).

    Args:
        optimizer: optimizer whose rates change.
        num_steps: number of steps after which the factor is ``1 / (1 + decay)``.
        decay: strength of the decay, at least 0.
        last_epoch: index of the last step, named as in all torch schedulers; -1 to start.

    Raises:
        ConfigError: an argument is not valid.
    """

    def __init__(
        self, optimizer: Optimizer, num_steps: int, decay: float = 1.0, last_epoch: int = -1
    ) -> None:
        checked("num_steps", num_steps, Number)
        checked("decay", decay, AtLeast0)
        self.num_steps, self.decay = num_steps, decay
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group for the next step."""
        below = 1 + self.decay * self.last_epoch / self.num_steps
        return [base / below for base in self.base_lrs]


def linear_scaling(base_batch: float, batch: float) -> float:
    """Return the factor of the learning rate for another batch size: the ratio of the sizes.

    The rule is for SGD and LARS with batches below the gradient noise scale.

    Source: Goyal et al. 2017, arXiv:1706.02677.
    """
    require(min(base_batch, batch) > 0, "batch sizes must be above 0", (base_batch, batch))
    return batch / base_batch


def square_root_scaling(base_batch: float, batch: float) -> float:
    """Return the square root of the ratio of two batch sizes, a factor of the learning rate.

    The rule is for Adam and LAMB, whose steps do not grow with the gradient.

    Source: You et al. 2020, arXiv:1904.00962, section 4.
    """
    return math.sqrt(linear_scaling(base_batch, batch))
