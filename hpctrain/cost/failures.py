"""Failures: the interval between checkpoints that costs least, and what is left of the time.

In closed form, and of simulated failures: nodes fail at any time, restarts included, independently
of each other and of how long they have been up. What was done since the last complete checkpoint
is lost.

Sources: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps";
Vaidya 1997, "Impact of checkpoint latency on overhead ratio of a checkpointing scheme".
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import ConfigError
from hpctrain.cost.machine import Machine

_NUM_FAILURES = 100_000  # of which an average is taken


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of computing between two checkpoints, to higher order: equation 37.

    A cost of two mean times between failures and more gives the mean time: hardly anything can be
    done then. The cost of a checkpoint that is written in the background is the time that the
    training stands still, not the time until it is on disk (Vaidya).
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def goodput(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the part of the time, 0 to 1, in which training gets on that is not lost again.

    ``mtbf_s`` is of all nodes together, ``interval_s`` the computing between two checkpoints;
    failures come at random, also during a checkpoint or a restart. Equation 20.
    """
    if math.isinf(mtbf_s):
        return 1.0 if math.isinf(interval_s) else interval_s / (interval_s + cost_s)
    paid_s = interval_s + cost_s  # in exponents below 0, which vanish where nothing gets on
    kept = math.exp(-(restart_s + paid_s) / mtbf_s) / -math.expm1(-paid_s / mtbf_s)
    return interval_s / mtbf_s * kept


class SimulatedRun(NamedTuple):
    """A run until its work is done, in seconds."""

    wall_s: float
    num_failures: int
    lost_s: float  # work that was done again
    goodput: float  # work over ``wall_s``


def simulate_run(
    work_s: float, interval_s: float, machine: Machine, *, seed: int = 0
) -> SimulatedRun:
    """Simulate a run of ``work_s`` seconds of work with a checkpoint after each ``interval_s``.

    The same ``seed`` gives the same run. Raises ``ConfigError``: the interval is not above 0.
    """
    if not interval_s > 0:
        raise ConfigError(f"an interval between checkpoints is more than 0 s, got {interval_s}")
    random = np.random.default_rng(seed)
    mean_s = machine.mtbf_s / machine.nodes
    done_s = lost_s = wall_s = start_s = 0.0
    num_failures = 0
    while True:
        up_s = random.exponential(mean_s) if math.isfinite(mean_s) else math.inf
        left_s = work_s - done_s
        # No checkpoint after the last interval.
        needed_s = start_s + left_s + (math.ceil(left_s / interval_s) - 1) * machine.checkpoint_s
        if up_s >= needed_s:
            wall_s += needed_s
            return SimulatedRun(wall_s, num_failures, lost_s, work_s / wall_s)
        saved, rest_s = divmod(max(0.0, up_s - start_s), interval_s + machine.checkpoint_s)
        done_s += saved * interval_s
        lost_s += min(rest_s, interval_s)
        wall_s += up_s
        start_s = machine.restart_s
        num_failures += 1


def best_interval(machine: Machine, *, seed: int = 0) -> float:
    """Return the seconds of work between checkpoints for which most of the time is work.

    Of simulated failures, drawn by ``seed``. Raises ``ConfigError``: nodes do not fail or a
    checkpoint costs nothing, so none is best.
    """
    if not (math.isfinite(machine.mtbf_s) and machine.checkpoint_s > 0):
        raise ConfigError(
            f"a best interval needs nodes that fail and checkpoints that cost time, got "
            f"mtbf_s={machine.mtbf_s} and checkpoint_s={machine.checkpoint_s}; set both"
        )
    # One time from each of as many equally likely ranges: an average over them is smooth.
    ranges = np.arange(_NUM_FAILURES) + np.random.default_rng(seed).random(_NUM_FAILURES)
    up_s = -np.log1p(-ranges / _NUM_FAILURES) * machine.mtbf_s / machine.nodes
    low, high = math.log(machine.checkpoint_s / 100), math.log(100 * up_s.max())
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-3:
        left, right = high - golden * (high - low), low + golden * (high - low)
        at_left, at_right = (_saved_s(math.exp(each), machine, up_s) for each in (left, right))
        low, high = (low, right) if at_left >= at_right else (left, high)
    return math.exp((low + high) / 2)


def _saved_s(interval_s: float, machine: Machine, up_s: NDArray[np.float64]) -> float:
    """Return the work that is not lost between failures that come after these times."""
    running_s = np.maximum(0.0, up_s - machine.restart_s)
    return float(np.floor(running_s / (interval_s + machine.checkpoint_s)).sum() * interval_s)
