"""Optimal checkpoint interval and fraction of useful time under node failures.

The module has formulas and a simulation. Each node fails independently of other nodes and of its
age, also during restarts. A failure loses all work since the last complete checkpoint.

Sources: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps";
Vaidya 1997, "Impact of checkpoint latency on overhead ratio of a checkpointing scheme".
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpctrain.core.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.cost.machine import Machine


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

    ``mtbf_s`` is the mean time between failures of all nodes together; ``interval_s`` is the
    computing time between two checkpoints. Failures are random, also during a checkpoint or a
    restart.
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
    work_s: float, interval_s: float, machine: "Machine", *, seed: int = 0
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


def best_interval(machine: "Machine") -> float:
    """Return the seconds of work between checkpoints that maximize the useful time.

    Raises:
        ConfigError: nodes do not fail or a checkpoint takes no time, so no interval is optimal.
    """
    if not (math.isfinite(machine.mtbf_s) and machine.checkpoint_s > 0):
        raise ConfigError(
            "mtbf_s must be finite and checkpoint_s above 0 for a best interval, got "
            f"mtbf_s={machine.mtbf_s} and checkpoint_s={machine.checkpoint_s}; set both"
        )
    return daly(machine.checkpoint_s, machine.mtbf_s / machine.nodes)
