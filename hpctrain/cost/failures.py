"""Optimal checkpoint interval and fraction of useful time under node failures.

The module has formulas and a simulation. Each node fails independently of other nodes and of its
age, also during restarts. A failure loses all work since the last complete checkpoint.

Sources: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps";
Vaidya 1997, "Impact of checkpoint latency on overhead ratio of a checkpointing scheme".
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import ConfigError
from hpctrain.cost.machine import Machine

_NUM_FAILURES = 100_000  # number of simulated failures to average over


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return the optimal seconds of computation between two checkpoints (equation 37).

    The result is ``mtbf_s`` if a checkpoint takes at least twice as long as ``mtbf_s``. The cost
    of a checkpoint that is written in the background is the time in which training is blocked, not
    the time until the checkpoint is on disk (Vaidya).
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def goodput(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the fraction of the time spent on work that no failure destroys (equation 20).

    ``mtbf_s`` refers to all nodes together, ``interval_s`` is the computation between two
    checkpoints. Failures are random, also during a checkpoint or a restart.
    """
    if math.isinf(mtbf_s):
        return 1.0 if math.isinf(interval_s) else interval_s / (interval_s + cost_s)
    paid_s = interval_s + cost_s  # negative exponents underflow to 0 if no work is kept
    kept = math.exp(-(restart_s + paid_s) / mtbf_s) / -math.expm1(-paid_s / mtbf_s)
    return interval_s / mtbf_s * kept


class SimulatedRun(NamedTuple):
    """Result of a simulated run, in seconds."""

    wall_s: float
    num_failures: int
    lost_s: float  # seconds of work that were repeated
    goodput: float  # work divided by ``wall_s``


def simulate_run(
    work_s: float, interval_s: float, machine: Machine, *, seed: int = 0
) -> SimulatedRun:
    """Simulate a run of ``work_s`` seconds of work with a checkpoint after each ``interval_s``.

    The same ``seed`` gives the same failures.

    Raises:
        ConfigError: the interval is not above 0.
    """
    if not interval_s > 0:
        raise ConfigError(
            f"the interval between checkpoints must be longer than 0 s, got {interval_s}"
        )
    random = np.random.default_rng(seed)
    mean_s = machine.mtbf_s / machine.nodes
    done_s = lost_s = wall_s = start_s = 0.0
    num_failures = 0
    while True:
        up_s = random.exponential(mean_s) if math.isfinite(mean_s) else math.inf
        left_s = work_s - done_s
        # No checkpoint follows the last interval.
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
    """Return the seconds of work between checkpoints that maximize the useful time.

    The failures are simulated with the random ``seed``.

    Raises:
        ConfigError: nodes do not fail or a checkpoint takes no time, so no interval is optimal.
    """
    if not (math.isfinite(machine.mtbf_s) and machine.checkpoint_s > 0):
        raise ConfigError(
            "mtbf_s must be finite and checkpoint_s above 0 for a best interval, got "
            f"mtbf_s={machine.mtbf_s} and checkpoint_s={machine.checkpoint_s}; set both"
        )
    # Stratified samples of the times between failures make the average smooth in the interval.
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
    """Return the seconds of work that checkpoints save, if nodes fail after the times ``up_s``."""
    running_s = np.maximum(0.0, up_s - machine.restart_s)
    return float(np.floor(running_s / (interval_s + machine.checkpoint_s)).sum() * interval_s)
