"""Failures: the interval between checkpoints that costs least, and what is left of the time."""

import math


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of computing between two checkpoints, to higher order.

    A cost of two mean times between failures and more gives the mean time: hardly anything can be
    done then.

    Where a checkpoint is written in the background, its cost is the time that the training
    stands still, not the time until it is on disk: Vaidya 1997, "Impact of checkpoint latency on
    overhead ratio of a checkpointing scheme".

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
        dumps", equation 37.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def goodput(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the part of the time, 0 to 1, in which training gets on that is not lost again.

    ``mtbf_s`` is of all nodes together, ``interval_s`` the computing between two checkpoints;
    failures come at random, also during a checkpoint or a restart.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
        dumps", equation 20.
    """
    if math.isinf(mtbf_s):
        return 1.0 if math.isinf(interval_s) else interval_s / (interval_s + cost_s)
    lost = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + cost_s) / mtbf_s)
    return interval_s / lost
