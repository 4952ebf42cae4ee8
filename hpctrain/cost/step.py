"""Closed forms of a training step: stragglers, sums beside backward, local steps, failures."""

import math
from dataclasses import dataclass
from statistics import NormalDist

from hpctrain.core.errors import ConfigError
from hpctrain.core.units import MIB
from hpctrain.cost.collectives import Way, allreduce
from hpctrain.cost.machine import Machine

BACKWARD = 2 / 3
"""Of the time to compute: forward multiplies once by every weight, backward twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained, as far as it costs time."""

    parameters: float
    samples_per_s: float  # of one rank that computes alone
    rank_batch: int = 32
    """Samples that a rank takes at once; those of a larger share come one after the other, and
    their gradients are added up."""
    bytes_per_parameter: float = 4.0
    bucket_bytes: float = 25 * MIB  # largest message of gradients
    overlap: bool = True  # whether gradients travel while backward computes others

    def __post_init__(self) -> None:
        """Refuse what is not above 0, by ``ConfigError``."""
        for name in ("parameters", "samples_per_s", "rank_batch", "bytes_per_parameter"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of a model must be above 0, got {getattr(self, name)}")

    @property
    def num_bytes(self) -> float:
        """Bytes of all gradients."""
        return self.parameters * self.bytes_per_parameter


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step."""

    compute_s: float  # of a rank that is neither late nor slow
    waiting_s: float  # for the slowest rank
    exposed_s: float  # communication that no computing hides, by step

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.waiting_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """Part of the time in which ranks compute."""
        return self.compute_s / self.total_s


def lateness(machine: Machine, local_steps: int = 1) -> float:
    """Return how many times as long as usual the slowest of all ranks computes, on average.

    Of times whose logarithms are normal with the machine's jitter, to about a percent; over steps
    between two averagings a rank's luck evens out. A slow node holds all others up.

    Source: Blom 1958, "Statistical estimates and transformed beta-variables", for the largest of
    normal values.
    """
    ranks = machine.num_ranks
    spread = machine.jitter / math.sqrt(local_steps)
    place = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
    slow = 1 - (1 - machine.slow_fraction) ** machine.nodes
    return math.exp(spread * place) * (1 + slow * (machine.slow_factor - 1))


def step_time(
    machine: Machine, model: Model, rank_share: float, way: Way, *, local_steps: int = 1
) -> StepTime:
    """Predict a step in which every rank learns from ``rank_share`` samples.

    With one local step, gradients are summed in buckets, behind or beside backward: of the last
    bucket nothing is hidden. With more, all parameters are averaged after so many steps, which
    nothing hides.
    """
    compute_s = rank_share / model.samples_per_s
    buckets = max(1, math.ceil(model.num_bytes / model.bucket_bytes))
    sum_s = buckets * allreduce(machine, model.num_bytes / buckets, way).seconds(machine)
    if local_steps > 1:
        exposed_s = sum_s / local_steps
    elif model.overlap:
        last_s = min(rank_share, model.rank_batch) / model.samples_per_s
        hidden_s = BACKWARD * last_s * (1 - 1 / buckets)
        exposed_s = max(sum_s - hidden_s, sum_s / buckets)
    else:
        exposed_s = sum_s
    return StepTime(compute_s, compute_s * (lateness(machine, local_steps) - 1), exposed_s)
