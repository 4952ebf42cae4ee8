"""Time of a training step, by formula and by simulation, with slow ranks and overlap.

The simulation sends the messages of ``hpctrain.cost.schedules``, the same messages that ranks send
in a real all-reduce. All messages of a round are simulated together. A message takes the latency
of its link plus its bytes divided by the bandwidth; a send ends when the message has arrived.
Ports are full duplex and send one message after the other in each direction. Messages of a round
share the bandwidth of a common NIC, or of the uplinks of a common leaf switch.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Annotated

import numpy as np

from hpctrain.core.checks import Amount, Bounds, CheckedFields, Number, Positive, checked
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import MIB
from hpctrain.cost.collectives import AllreduceSpec, allreduce, around, between_nodes, bound
from hpctrain.cost.machine import Machine
from hpctrain.cost.round_messages import Clocks, Times, members, phases
from hpctrain.cost.schedules import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(CheckedFields):
    """Properties of a trained model that determine the time of a step.

    Raises:
        ConfigError: a value is out of range.
    """

    parameters: Amount
    samples_per_s: Amount  # throughput of a rank that computes alone
    rank_batch: Annotated[int, Bounds(above=0)] = 32
    """Largest batch of a rank; for more samples, gradients of several batches are accumulated."""
    bytes_per_parameter: Positive = 4.0
    bucket_bytes: Positive = 25 * MIB  # largest message with gradients
    overlap: bool = True  # whether gradients are sent during backward
    backward: Annotated[float, Bounds(least=0, most=1)] = 2 / 3
    """Fraction of the computing time that is spent in the backward pass.

    The forward pass multiplies once by every weight, the backward pass twice.
    """

    @property
    def num_bytes(self) -> float:
        """Bytes of all gradients."""
        return self.parameters * self.bytes_per_parameter

    @property
    def num_buckets(self) -> int:
        """Number of messages with gradients, all of equal length."""
        return max(1, math.ceil(self.num_bytes / self.bucket_bytes))

    def left_s(self, rank_share: float, done: float) -> float:
        """Return the seconds that backward still takes when a part ``done`` of gradients is ready.

        ``done`` is a fraction, 0 to 1. The backward pass of the last batch is assumed to compute
        gradients at a constant rate. The result is 0 if ``overlap`` is False.
        """
        last_s = min(rank_share, self.rank_batch) / self.samples_per_s
        return self.backward * last_s * (1 - done) if self.overlap else 0.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a training step by cause."""

    compute_s: float  # computation of a rank without delay
    waiting_s: float  # waiting for the slowest rank
    exposed_s: float  # communication that is not overlapped with computation

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.compute_s + self.waiting_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """Fraction of the step in which ranks compute."""
        return self.compute_s / self.total_s


def lateness(machine: Machine, local_steps: int = 1) -> float:
    """Return the expected computing time of the slowest rank, relative to a rank without delay.

    Computing times are log-normal with the machine's jitter; the result is accurate to about 1 %.
    The jitter of a rank averages out over ``local_steps`` steps. All ranks wait for slow nodes.

    Source: Blom 1958, "Statistical estimates and transformed beta-variables", for the expected
    maximum of normal values.
    """
    ranks = machine.num_ranks
    spread = machine.jitter / math.sqrt(local_steps)
    place = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
    slow = 1 - (1 - machine.slow_fraction) ** machine.nodes
    return math.exp(spread * place) * (1 + slow * (machine.slow_factor - 1))


def step_time(
    machine: Machine, model: Model, rank_share: float, spec: AllreduceSpec, *, local_steps: int = 1
) -> StepTime:
    """Return the predicted time of a step in which each rank processes ``rank_share`` samples.

    With one local step, gradients are summed in buckets. If ``model.overlap`` is set, all buckets
    except the last are summed during backward. With more local steps, parameters are averaged once
    per ``local_steps`` steps, without overlap.
    """
    compute_s, buckets = rank_share / model.samples_per_s, model.num_buckets
    sum_s = buckets * allreduce(machine, model.num_bytes / buckets, spec).seconds(machine)
    hidden_s = model.left_s(rank_share, 1 / buckets) if local_steps == 1 else 0.0
    exposed_s = max(sum_s - hidden_s, sum_s / buckets) / local_steps
    return StepTime(compute_s, compute_s * (lateness(machine, local_steps) - 1), exposed_s)


def simulate_steps(  # noqa: PLR0913 - the arguments of ``step_time``, and the number of steps
    machine: Machine,
    model: Model,
    rank_share: float,
    spec: AllreduceSpec,
    *,
    local_steps: int = 1,
    num_steps: int = 1,
    seed: int = 0,
) -> StepTime:
    """Return the mean time of at least ``num_steps`` simulated steps.

    A rank starts a step when it has the sums of the previous step; the number of steps is rounded
    up to a multiple of ``local_steps``. Buckets are sent one after another. The computing time of
    a rank in a step is a random number with the ``jitter`` of the machine; on slow nodes
    this number is multiplied by ``slow_factor``. The same ``seed`` gives the same times.
    """
    checked("num_steps", num_steps, Number)
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
            done = allreduce_times(spec, num_bytes, machine, np.maximum(ready, done))
        begin = np.maximum(begin + compute_s, done)
    steps = num_rounds * local_steps
    step_s, slowest_s = float(begin.max()) / steps, slowest_s / steps
    return StepTime(alone_s, slowest_s - alone_s, max(0.0, step_s - slowest_s))


def least_step_s(
    machine: Machine, compute_s: float, *, network_bytes: float = 0.0, node_bytes: float = 0.0
) -> float:
    """Return a lower bound of the seconds of a step that moves the given bytes.

    The bound assumes complete overlap of communication and computation, the number of rounds of
    ``collectives.bound``, and links that are all busy at the same time.

    Args:
        machine: nodes and links.
        compute_s: computing time of a rank.
        network_bytes: bytes sent between nodes, summed over all nodes. The all-reduce of m bytes
            over N nodes sends at least 2 (N - 1) m bytes.
        node_bytes: bytes sent inside nodes, summed over all ranks.
    """
    between, inside = bound(machine, 0.0), bound(replace(machine, nodes=1), 0.0)
    loads = (
        between._replace(network_bytes=network_bytes / machine.nodes / machine.nics),
        inside._replace(node_bytes=node_bytes / machine.num_ranks),
    )
    return max(compute_s, *(load.seconds(machine) for load in loads))


def allreduce_times(
    spec: AllreduceSpec, num_bytes: float, machine: Machine, start: Times | None = None
) -> Times:
    """Return the time at which each rank has the sum over all ranks.

    The messages between nodes are simulated. ``collectives.around`` computes the times of codec
    and node memory before and after these messages. With rails, the ranks of a node synchronize
    before and after the messages.

    Args:
        spec: algorithm, rails and codec.
        num_bytes: size of the message.
        machine: ranks and links.
        start: time in seconds at which each rank starts the all-reduce; 0 by default.

    Returns:
        The time in seconds for each rank.

    Raises:
        ConfigError: ``start`` does not have a time for each rank.
    """
    rails, sent = between_nodes(machine, num_bytes, spec)
    before, after = (each.seconds(machine) for each in around(machine, num_bytes, spec))
    times = _synchronized(_started(start, machine), machine, rails) + before
    groups = members(machine, rails)
    if (size := groups.shape[1]) > 1 and sent:
        schedule = SCHEDULES[spec.algorithm]
        num_segments = schedule.num_segments(int(sent), size)
        piece_bytes = sent / (schedule.num_parts(size) * num_segments)
        turns = machine.turns(rails or machine.ranks_per_node)
        clocks = Clocks(times[groups].ravel(), piece_bytes, machine, turns)
        done = clocks.take(phases(schedule, num_segments, machine, rails))
        times[groups] = done.reshape(groups.shape)
    return _synchronized(times, machine, rails) + after


def _started(start: Times | None, machine: Machine) -> Times:
    if start is None:
        return np.zeros(machine.num_ranks)
    if len(start) != machine.num_ranks:
        raise ConfigError(
            f"start must have a time for each rank, got {len(start)} for {machine.num_ranks} ranks"
        )
    return np.asarray(start, dtype=np.float64)


def _synchronized(times: Times, machine: Machine, rails: int) -> Times:
    """With rails, replace each time by the latest time of its node; else return ``times``."""
    if not rails:
        return times
    return np.repeat(times.reshape(machine.nodes, -1).max(axis=1), machine.ranks_per_node)
