"""Planner of nodes, batch, codec and local steps for a goal, with the predicted cost."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, product
from operator import attrgetter
from typing import Any

from hpctrain.core.checks import Amount, CheckedFields, Number, Positive
from hpctrain.core.errors import ConfigError
from hpctrain.cost import control
from hpctrain.cost.collectives import CODECS, AllreduceSpec, codec_cost, fastest
from hpctrain.cost.failures import daly, goodput
from hpctrain.cost.learning import most_local_steps, samples_needed
from hpctrain.cost.machine import Machine
from hpctrain.cost.step import Model, StepTime, step_time

PAYS = 0.75
"""More nodes are worthwhile if each doubling of their number reduces the time to this fraction or
less, so that a doubling costs at most 50 % more node-hours."""
GAIN = 0.95
"""The planner uses a codec or local steps if they reduce the time to this fraction or less. Both
change the results of training, and the cost models are not exact."""
SLOWEST, FASTEST = 1e3, 1e15  # bytes per second, limits of the search for ``pays_below``


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal(CheckedFields):
    """Goal of a training run, and limits of the planner.

    Raises:
        ConfigError: a value is invalid.
    """

    samples: Amount  # number of samples that reach the goal with batches of size ``batch``
    batch: Number
    """Samples of a step over all ranks, for which ``samples`` is given. The planner tries other
    batches only if ``noise_scale`` is finite, since their ``samples`` depend on it."""
    noise_scale: Positive = math.inf  # samples, see ``learning.noise_scale``
    deadline_s: Positive = math.inf
    max_local_steps: Number = 1  # steps per averaging of parameters; 1: average gradients
    codecs: tuple[str, ...] = tuple(CODECS)
    """Allowed codecs, see ``collectives.codec_cost``; ``none`` is always allowed."""

    def samples_at(self, batch: int) -> float:
        """Return the samples that training with batch size ``batch`` needs to reach the goal."""
        tiny = self.samples / (1 + self.batch / self.noise_scale)
        return samples_needed(tiny, self.noise_scale, batch)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration that reaches the goal, with its predicted time."""

    machine: Machine  # machine with the nodes of this candidate
    batch: int  # samples of a step, over all ranks
    spec: AllreduceSpec
    local_steps: int
    step: StepTime
    num_steps: float
    checkpoint_every_s: float  # seconds of computation; infinite if nodes do not fail
    goodput: float  # useful fraction of the time

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.machine.nodes

    @property
    def seconds(self) -> float:
        """Seconds until the goal is reached, including the messages of the start."""
        start_s = control.PARTS["start"].seconds(self.machine)
        return start_s + self.num_steps * self.step.total_s / self.goodput

    @property
    def node_hours(self) -> float:
        """Node-hours until the goal is reached."""
        return self.nodes * self.seconds / 3600

    @property
    def score(self) -> float:
        """Seconds until the goal is reached, with a penalty for a codec and for local steps."""
        departures = (self.spec.codec != "none") + (self.local_steps > 1)
        return self.seconds / GAIN**departures


@dataclass(frozen=True, slots=True)
class Payoff:
    """Effect of a codec, or of local steps, on the step time of the best candidate."""

    codec: str
    local_steps: int
    step: StepTime
    saves: float  # saved fraction of the step time; negative if the step takes longer
    pays_below: float  # saves time below this NIC bandwidth in bytes/s; 0: never, inf: always


@dataclass(frozen=True, slots=True)
class Advice:
    """Result of the planner: the best candidates, and the benefit of more nodes and of codecs."""

    best: Candidate
    next_best: tuple[Candidate, ...]  # three more, the best of each other method first
    by_nodes: tuple[Candidate, ...]  # best candidate for each number of nodes, fewest nodes first
    pays_up_to: int  # largest worthwhile number of nodes
    payoffs: tuple[Payoff, ...]  # effect of each codec and of local steps
    reason: str  # rule that selected ``best``


def advise(machine: Machine, model: Model, goal: Goal) -> Advice:
    """Return the best configuration that reaches a goal, and its alternatives.

    The planner tries combinations of nodes, batch size, codec and local steps. Without a deadline,
    the best candidate is the fastest on a worthwhile number of nodes (``PAYS``). With a deadline,
    the best candidate has the fewest node-hours.

    Raises:
        ConfigError: no candidate ends before the deadline, no batch is large enough for the ranks,
            or failures prevent progress.
    """
    found = list(_candidates(machine, model, goal))
    if not found:
        raise ConfigError(
            f"a batch must have at least one sample per rank, got {goal.batch} samples for the "
            f"{machine.ranks_per_node} ranks of a node; increase the batch"
        )
    candidates = [each for each in found if each.goodput > 0]
    if not candidates:
        raise ConfigError(
            f"a run must make progress between two failures, got "
            f"mtbf_s={machine.mtbf_s:g} per node and restart_s={machine.restart_s:g}; correct the "
            f"machine file"
        )
    groups = groupby(candidates, key=attrgetter("nodes"))  # fewest nodes first
    by_nodes = [min(group, key=attrgetter("score")) for _, group in groups]
    pays_up_to = _pays_up_to(by_nodes)
    if math.isfinite(goal.deadline_s):
        eligible = [c for c in candidates if c.seconds <= goal.deadline_s]
        eligible.sort(key=lambda c: c.score * c.nodes)
        reason = "least node-hours within the deadline"
    else:
        eligible = [c for c in candidates if c.nodes <= pays_up_to]
        eligible.sort(key=attrgetter("score"))
        reason = "fastest on a worthwhile number of nodes"
    if not eligible:
        soonest = min(candidates, key=lambda c: c.seconds)
        raise ConfigError(
            f"the deadline must be at least {soonest.seconds / 3600:.3g} h, the time of the "
            f"fastest candidate, on {soonest.nodes} nodes, got {goal.deadline_s / 3600:.3g} h; "
            "allow more nodes, a later deadline or another goal"
        )
    best, *others = _unlike_first(eligible)
    payoffs = tuple(_payoffs(best, model, goal))
    return Advice(best, tuple(others[:3]), tuple(by_nodes), pays_up_to, payoffs, reason)


def _unlike_first(candidates: list[Candidate]) -> list[Candidate]:
    """Move the first candidate of each method to the front of the list.

    A method is a codec, with or without local steps.
    """
    first = {(c.spec.codec, c.local_steps > 1): c for c in reversed(candidates)}
    chosen = [c for c in candidates if c in first.values()]
    return chosen + [c for c in candidates if c not in chosen]


def _pays_up_to(by_nodes: list[Candidate]) -> int:
    nodes = by_nodes[0].nodes
    for fewer, more in pairwise(by_nodes):
        doublings = math.log2(more.nodes / fewer.nodes)
        if more.seconds > fewer.seconds * PAYS**doublings:
            break
        nodes = more.nodes
    return nodes


def _candidates(machine: Machine, model: Model, goal: Goal) -> Iterator[Candidate]:
    # Codecs with equal cost have equal predictions, so the planner tries only one of them.
    codecs = {codec_cost(name): name for name in ("none", *goal.codecs)}.values()
    for nodes in _numbers_of_nodes(machine.nodes):
        part = replace(machine, nodes=nodes)
        batches = [batch for batch in _batches(goal) if batch >= part.num_ranks]
        specs = [_fastest(part, model, codec) for codec in (codecs if nodes > 1 else ["none"])]
        mtbf_s = machine.mtbf_s / nodes
        save_s = machine.checkpoint_s + control.PARTS["save"].seconds(part)
        restart_s = machine.restart_s + control.PARTS["recovery"].seconds(part)
        for spec, batch in product(specs, batches):
            num_steps = max(1.0, goal.samples_at(batch) / batch)
            for local_steps in _local_steps(part, goal, batch):
                share = batch / part.num_ranks
                step = _step(part, model, share, spec, local_steps)
                every_s = daly(save_s, mtbf_s) if mtbf_s < math.inf else math.inf
                # The interval is at least one step, also if a checkpoint costs nothing.
                every_s = max(every_s, step.total_s)
                left = goodput(every_s, save_s, restart_s, mtbf_s)
                yield Candidate(part, batch, spec, local_steps, step, num_steps, every_s, left)


def _step(
    machine: Machine, model: Model, share: float, spec: AllreduceSpec, local_steps: int
) -> StepTime:
    """Return the time of a step, including a stop check and a header, which local steps share."""
    found = step_time(machine, model, share, spec, local_steps=local_steps)
    header_s, stop_s = (control.PARTS[each].seconds(machine) for each in ("step", "stop check"))
    return replace(found, exposed_s=found.exposed_s + header_s / local_steps + stop_s)


def _fastest(machine: Machine, model: Model, codec: str) -> AllreduceSpec:
    # The choice depends only on the message size, which is equal for all buckets.
    return fastest(machine, min(model.num_bytes, model.bucket_bytes), codec)


def _local_steps(machine: Machine, goal: Goal, batch: int) -> list[int]:
    """Return the numbers of local steps to try: powers of two up to ``most_local_steps``.

    Up to this limit, which was proved for convex losses, training converges as fast as with one
    local step.
    """
    share, num_steps = batch / machine.num_ranks, goal.samples_at(batch) / batch
    most = min(goal.max_local_steps, most_local_steps(num_steps, machine.num_ranks, share))
    return _powers(most if machine.num_ranks > 1 else 1)


def _payoffs(best: Candidate, model: Model, goal: Goal) -> Iterator[Payoff]:
    here, share = best.machine, best.batch / best.machine.num_ranks

    def step(bytes_per_s: float, codec: str, local_steps: int) -> StepTime:
        network = replace(here.network, bytes_per_s=bytes_per_s)
        machine = replace(here, network=network)
        spec = _fastest(machine, model, codec)
        return _step(machine, model, share, spec, local_steps)

    def saves(bytes_per_s: float, *option: Any) -> float:
        return 1 - step(bytes_per_s, *option).total_s / step(bytes_per_s, "none", 1).total_s

    rows = [(codec, 1) for codec in goal.codecs if codec != "none" and here.nodes > 1]
    rows += [("none", many) for many in _local_steps(here, goal, best.batch) if many > 1]
    for option in rows:
        low, high = SLOWEST, FASTEST
        if saves(high, *option) > 0:
            low = math.inf
        elif saves(low, *option) <= 0:
            low = 0.0
        while high > 1.005 * low > 0:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if saves(middle, *option) > 0 else (low, middle)
        rate = here.network.bytes_per_s
        yield Payoff(*option, step(rate, *option), saves(rate, *option), low)


def _numbers_of_nodes(most: int) -> list[int]:
    """Return the numbers of nodes to try: powers of two, their midpoints, and ``most``."""
    numbers = [n for power in _powers(most) for n in (power, 3 * power // 2)]
    return sorted({*(n for n in numbers if n <= most), most})


def _batches(goal: Goal) -> list[int]:
    """Return the batch of the goal times powers of two, up to 8 times the noise scale."""
    is_known = math.isfinite(goal.noise_scale)
    return [goal.batch * k for k in _powers(8 * goal.noise_scale / goal.batch if is_known else 1)]


def _powers(most: float) -> list[int]:
    """Return the powers of two up to ``most``, but at least 1."""
    return [1 << k for k in range(int(max(most, 1)).bit_length())]
