"""A training step, in closed form and by events: stragglers, sums beside backward, local steps."""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Annotated

import numpy as np

from hpctrain.core.checks import Amount, Bounds, CheckedFields, Positive
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import MIB
from hpctrain.cost.collectives import Way, allreduce, bound
from hpctrain.cost.machine import Machine
from hpctrain.cost.simulate import allreduce_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(CheckedFields):
    """What is trained, as far as it costs time; ``ConfigError`` where a rule is broken."""

    parameters: Amount
    samples_per_s: Amount  # of one rank that computes alone
    rank_batch: Annotated[int, Bounds(above=0)] = 32
    """Samples that a rank takes at once; those of a larger share come one after the other, and
    their gradients are added up."""
    bytes_per_parameter: Positive = 4.0
    bucket_bytes: Positive = 25 * MIB  # largest message of gradients
    overlap: bool = True  # whether gradients travel while backward computes others
    backward: Annotated[float, Bounds(least=0, most=1)] = 2 / 3
    """Its part of the time to compute: forward multiplies once by every weight, backward twice."""

    @property
    def num_bytes(self) -> float:
        """Bytes of all gradients."""
        return self.parameters * self.bytes_per_parameter

    @property
    def num_buckets(self) -> int:
        """Messages of gradients, all of one length."""
        return max(1, math.ceil(self.num_bytes / self.bucket_bytes))

    def left_s(self, rank_share: float, done: float) -> float:
        """Return how long a rank still computes once this part of the gradients is there.

        Evenly by bytes, in the backward of the samples that it takes last.
        """
        last_s = min(rank_share, self.rank_batch) / self.samples_per_s
        return self.backward * last_s * (1 - done) if self.overlap else 0.0


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
    compute_s, buckets = rank_share / model.samples_per_s, model.num_buckets
    sum_s = buckets * allreduce(machine, model.num_bytes / buckets, way).seconds(machine)
    hidden_s = model.left_s(rank_share, 1 / buckets) if local_steps == 1 else 0.0
    exposed_s = max(sum_s - hidden_s, sum_s / buckets) / local_steps
    return StepTime(compute_s, compute_s * (lateness(machine, local_steps) - 1), exposed_s)


def simulate_steps(  # noqa: PLR0913 - as of ``step_time``, and how many
    machine: Machine,
    model: Model,
    rank_share: float,
    way: Way,
    *,
    local_steps: int = 1,
    num_steps: int = 1,
    seed: int = 0,
) -> StepTime:
    """Simulate what ``step_time`` predicts; return the mean of ``num_steps`` steps or more.

    Each rank begins a step as soon as it has the sums of the last; with local steps, rounds of so
    many are whole. Buckets travel one after the other. A rank's time to compute is drawn for each
    step by the machine's ``jitter``, and is ``slow_factor`` times as long where the node is slow.
    The same ``seed`` gives the same times.
    """
    if num_steps < 1:
        raise ConfigError(f"there is 1 step or more to simulate, got {num_steps}")
    random = np.random.default_rng(seed)
    slow = np.zeros(machine.nodes, dtype=bool)
    slow[random.permutation(machine.nodes)[: round(machine.slow_fraction * machine.nodes)]] = True
    alone_s = rank_share / model.samples_per_s
    base_s = np.repeat(alone_s * np.where(slow, machine.slow_factor, 1.0), machine.ranks_per_node)
    num_rounds, buckets = -(-num_steps // local_steps), model.num_buckets
    begin, slowest_s = np.zeros(machine.num_ranks), 0.0
    for _ in range(num_rounds):
        luck = random.lognormal(0.0, machine.jitter, (local_steps, machine.num_ranks)).sum(axis=0)
        compute_s = base_s * luck
        slowest_s += float(compute_s.max())
        done = begin
        for bucket in range(1, buckets + 1):
            left_s = model.left_s(rank_share, bucket / buckets) if local_steps == 1 else 0.0
            ready = begin + compute_s * (1 - left_s / alone_s)
            num_bytes = model.num_bytes / buckets
            done = allreduce_times(way, num_bytes, machine, np.maximum(ready, done))
        begin = np.maximum(begin + compute_s, done)
    steps = num_rounds * local_steps
    step_s, slowest_s = float(begin.max()) / steps, slowest_s / steps
    return StepTime(alone_s, slowest_s - alone_s, max(0.0, step_s - slowest_s))


def least_step_s(
    machine: Machine, compute_s: float, *, network_bytes: float = 0.0, node_bytes: float = 0.0
) -> float:
    """Return what no step goes below that moves so many bytes, those of all ranks together.

    All computing may hide what travels, but a sum takes as many rounds as ``bound`` says, and the
    links of a level are busy all at once at best. Gradients of m bytes move 2 (N - 1) m between N
    nodes, or more.
    """
    between, inside = bound(machine, 0.0), bound(replace(machine, nodes=1), 0.0)
    asked = (
        between._replace(network_bytes=network_bytes / machine.nodes / machine.nics),
        inside._replace(node_bytes=node_bytes / machine.num_ranks),
    )
    return max(compute_s, *(load.seconds(machine) for load in asked))
