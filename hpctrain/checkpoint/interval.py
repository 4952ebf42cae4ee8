"""How long to compute between two checkpoints, from what one costs and how often all fails."""

import math

from hpctrain.core.errors import ConfigError


def young(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of computing between two checkpoints, to first order.

    Args:
        cost_s: what a checkpoint takes away from the computing.
        mtbf_s: mean time between two failures of the whole job.

    Raises:
        ConfigError: a cost below 0, or a mean time that is not above 0.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval".
    """
    _check(cost_s, mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of computing between two checkpoints, to higher order.

    Args and errors as ``young``, which it approaches as the cost gets small. A cost of two mean
    times between failures and more gives the mean time: hardly anything can be done then.

    Where a checkpoint is written in the background, its cost is the time that the training
    stands still, not the time until it is on disk: Vaidya 1997, "Impact of checkpoint latency on
    overhead ratio of a checkpointing scheme".

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
        dumps", equation 37.
    """
    _check(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def _check(cost_s: float, mtbf_s: float) -> None:
    if not (cost_s >= 0 and mtbf_s > 0):
        raise ConfigError(
            f"an interval follows from a cost of at least 0 s and a mean time between failures "
            f'above 0 s, got {cost_s:g} s and {mtbf_s:g} s; give mtbf as in "24h"'
        )
