"""Event model of a run with failures: the part of the time that counts, the best interval."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import ConfigError
from hpctrain.cost.machine import Machine

_NUM_FAILURES = 100_000  # of which an average is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A run until its work is done, in seconds."""

    wall_s: float
    num_failures: int
    lost_s: float
    """Work that was done again."""
    goodput: float
    """Work over ``wall_s``."""


def simulate_run(
    work_s: float, interval_s: float, machine: Machine, *, seed: int = 0
) -> SimulatedRun:
    """Simulate a run of ``work_s`` seconds of work with a checkpoint after each ``interval_s``.

    Nodes fail at any time, restarts included, independently of each other and of how long they
    have been up; the work since the last complete checkpoint is lost. The same ``seed`` gives the
    same run.
    """
    _check(interval_s)
    random = np.random.default_rng(seed)
    mean_s = machine.mtbf_s / machine.nodes
    done_s = lost_s = wall_s = 0.0
    num_failures = 0
    while True:
        up_s = random.exponential(mean_s) if math.isfinite(mean_s) else math.inf
        start_s = machine.restart_s if num_failures else 0.0
        left_s = work_s - done_s
        # No checkpoint after the last interval.
        needed_s = start_s + left_s + (math.ceil(left_s / interval_s) - 1) * machine.checkpoint_s
        if up_s >= needed_s:
            wall_s += needed_s
            return SimulatedRun(
                wall_s=wall_s,
                num_failures=num_failures,
                lost_s=lost_s,
                goodput=work_s / wall_s,
            )
        running_s = max(0.0, up_s - start_s)
        saved, rest_s = divmod(running_s, interval_s + machine.checkpoint_s)
        done_s += saved * interval_s
        lost_s += min(rest_s, interval_s)
        wall_s += up_s
        num_failures += 1


def simulated_goodput(interval_s: float, machine: Machine, *, seed: int = 0) -> float:
    """Return the part of a long run's time that is work, with a checkpoint each ``interval_s``."""
    _check(interval_s)
    return _goodput(interval_s, machine, _times_between_failures(machine, seed))


def best_interval(machine: Machine, *, seed: int = 0) -> float:
    """Return the seconds of work between checkpoints for which most of the time is work.

    Raises ``ConfigError``: nodes do not fail or a checkpoint costs nothing, so none is best.
    """
    if not (math.isfinite(machine.mtbf_s) and machine.checkpoint_s > 0):
        raise ConfigError(
            f"a best interval needs nodes that fail and checkpoints that cost time, got "
            f"mtbf_s={machine.mtbf_s} and checkpoint_s={machine.checkpoint_s}; set both"
        )
    between_s = _times_between_failures(machine, seed)
    low, high = math.log(machine.checkpoint_s / 100), math.log(100 * between_s.max())
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-3:
        left, right = high - golden * (high - low), low + golden * (high - low)
        at_left, at_right = (
            _goodput(math.exp(each), machine, between_s) for each in (left, right)
        )
        low, high = (low, right) if at_left >= at_right else (left, high)
    return math.exp((low + high) / 2)


def _times_between_failures(machine: Machine, seed: int) -> NDArray[np.float64]:
    """Draw one time from each of as many equally likely ranges: an average over them is smooth."""
    ranges = np.arange(_NUM_FAILURES) + np.random.default_rng(seed).random(_NUM_FAILURES)
    times: NDArray[np.float64] = -np.log1p(-ranges / _NUM_FAILURES)
    return times * machine.mtbf_s / machine.nodes


def _goodput(interval_s: float, machine: Machine, between_s: NDArray[np.float64]) -> float:
    cycle_s = interval_s + machine.checkpoint_s
    if not math.isfinite(machine.mtbf_s):
        return interval_s / cycle_s
    saved = np.floor(np.maximum(0.0, between_s - machine.restart_s) / cycle_s)
    return float(saved.sum() * interval_s / between_s.sum())


def _check(interval_s: float) -> None:
    if not interval_s > 0:
        raise ConfigError(f"an interval between checkpoints is more than 0 s, got {interval_s}")
