"""Event model of training steps: ranks that compute, buckets that become ready, their sums."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpctrain.core.errors import ConfigError
from hpctrain.cost.machine import Machine
from hpctrain.cost.simulate import Times

Collective = Callable[[float, Machine, Times], Times]
"""Of the bytes of a bucket, the machine, and when each rank enters; returns when each has the sum,
such as ``functools.partial(allreduce_times, "ring")``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one rank does in a step."""

    compute_s: float
    """Forward, backward and update of a rank that is not slow."""
    bucket_bytes: tuple[int, ...]
    """Of the gradients, in the order in which backward completes them."""
    backward_share: float = 2 / 3
    """Part of ``compute_s`` at the end of it in which buckets become ready, evenly by bytes."""
    overlapped: bool = True
    """Whether a bucket travels as soon as it is ready, or all of them do after backward."""

    def __post_init__(self) -> None:
        if not (self.compute_s > 0 and 0 <= self.backward_share <= 1):
            raise ConfigError(
                f"a step computes for more than 0 s, and from 0 to 1 of it is backward, got "
                f"compute_s={self.compute_s} and backward_share={self.backward_share}"
            )
        if any(num_bytes <= 0 for num_bytes in self.bucket_bytes):
            raise ConfigError(f"a bucket has bytes, 1 or more, got {self.bucket_bytes}")

    @property
    def ready(self) -> tuple[float, ...]:
        """For each bucket, which part of ``compute_s`` has passed when it is ready."""
        sizes = np.array(self.bucket_bytes, dtype=np.float64)
        done = np.cumsum(sizes) / max(1.0, sizes.sum())
        return tuple((1 - self.backward_share * (1 - done)).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """Where the time of a step goes, on average over steps, in seconds."""

    step_s: float
    compute_s: float
    """Of a rank, on average over ranks."""
    straggling_s: float
    """By how much the slowest rank of each step computes longer than the average one."""
    exposed_s: float
    """What is left: communication while nothing is computed."""
    efficiency: float
    """A rank's time if it were alone and not slow, over ``step_s``."""


def simulate_steps(
    workload: Workload,
    machine: Machine,
    collective: Collective,
    *,
    num_steps: int = 1,
    seed: int = 0,
) -> SimulatedStep:
    """Simulate steps in a row; each rank begins one as soon as it has the sums of the last.

    Buckets travel one after the other. Ranks compute ``workload.compute_s`` times a factor that
    is drawn for each rank and step from the machine's ``jitter``, and its ``slow_factor`` where
    the node is slow. The same ``seed`` gives the same times.
    """
    if num_steps < 1:
        raise ConfigError(f"there is 1 step or more to simulate, got {num_steps}")
    random = np.random.default_rng(seed)
    slow = np.zeros(machine.nodes, dtype=bool)
    slow[random.permutation(machine.nodes)[: round(machine.slow_fraction * machine.nodes)]] = True
    base_s = workload.compute_s * np.where(slow, machine.slow_factor, 1.0)
    base_s = np.repeat(base_s, machine.ranks_per_node)
    begin = np.zeros(machine.num_ranks)
    means, slowest = [], []
    for _ in range(num_steps):
        compute_s = base_s * random.lognormal(0.0, machine.jitter, machine.num_ranks)
        means.append(compute_s.mean())
        slowest.append(compute_s.max())
        done = begin
        for num_bytes, share in zip(workload.bucket_bytes, workload.ready, strict=True):
            ready = begin + compute_s * (share if workload.overlapped else 1.0)
            done = collective(num_bytes, machine, np.maximum(ready, done))
        begin = np.maximum(begin + compute_s, done)
    step_s = float(begin.max()) / num_steps
    mean_s, slowest_s = float(np.mean(means)), float(np.mean(slowest))
    return SimulatedStep(
        step_s=step_s,
        compute_s=mean_s,
        straggling_s=slowest_s - mean_s,
        exposed_s=max(0.0, step_s - slowest_s),
        efficiency=workload.compute_s / step_s,
    )
