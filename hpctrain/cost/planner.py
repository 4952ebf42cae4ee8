"""The planner: which nodes, batch, codec and local steps reach a goal, and at what cost."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from hpctrain.core.errors import ConfigError
from hpctrain.cost.collectives import CODECS, Way, fastest
from hpctrain.cost.failures import daly, goodput
from hpctrain.cost.learning import most_local_steps, samples_needed
from hpctrain.cost.machine import Machine
from hpctrain.cost.step import Model, StepTime, step_time

PAYS = 0.75
"""More nodes pay as long as twice as many take at most this part of the time: then a run costs at
most half as much again."""
GAIN = 0.95
"""A codec, and local steps, are taken where they bring the time down to this part or below: both
change what is computed, and models are not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What shall be reached; ``ConfigError`` if it cannot."""

    samples: float  # to learn from until the goal, in batches of ``batch``
    batch: int
    """Batch of all ranks by which ``samples`` is known; it is kept where no noise scale says what
    another one takes."""
    noise_scale: float = math.inf  # in samples: ``learning.noise_scale``
    deadline_s: float = math.inf
    max_local_steps: int = 1  # between two averagings; 1 averages gradients in every step

    def __post_init__(self) -> None:
        for name in ("samples", "batch", "noise_scale", "deadline_s", "max_local_steps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of a goal must be above 0, got {getattr(self, name)}")

    def samples_at(self, batch: int) -> float:
        """Return how many samples it takes in batches of another size."""
        tiny = self.samples / (1 + self.batch / self.noise_scale)
        return samples_needed(tiny, self.noise_scale, batch)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to reach the goal."""

    machine: Machine  # with as many nodes as it takes
    batch: int  # samples of a step, over all ranks
    way: Way
    local_steps: int
    step: StepTime
    num_steps: float
    checkpoint_every_s: float  # of computing; infinite where nothing fails
    goodput: float  # part of the time that failures and checkpoints leave

    @property
    def nodes(self) -> int:
        """Nodes that it takes."""
        return self.machine.nodes

    @property
    def seconds(self) -> float:
        """Time until the goal."""
        return self.num_steps * self.step.total_s / self.goodput

    @property
    def node_hours(self) -> float:
        """What it costs."""
        return self.nodes * self.seconds / 3600

    @property
    def score(self) -> float:
        """Seconds, and more for what departs from plain averaging in every step."""
        departures = (self.way.codec != "none") + (self.local_steps > 1)
        return self.seconds / GAIN**departures


@dataclass(frozen=True, slots=True)
class Advice:
    """What the planner has found."""

    best: Candidate
    next_best: tuple[Candidate, ...]  # three others: first the best with another codec or method
    by_nodes: tuple[Candidate, ...]  # the best on each number of nodes, fewest first
    pays_up_to: int  # nodes beyond which more stop paying
    reason: str  # why ``best`` is the best, for people


def advise(machine: Machine, model: Model, goal: Goal) -> Advice:
    """Try all numbers of nodes, batches, codecs and local steps that are sensible.

    The best is the fastest on a number of nodes that pays (``PAYS``), or, with a deadline, the
    one of least node-hours that meets it.

    Raises ``ConfigError``: nothing meets the deadline, or no batch is large enough for the ranks.
    """
    candidates = list(_candidates(machine, model, goal))
    if not candidates:
        raise ConfigError(
            f"a batch has a sample for each rank at least, got {goal.batch} samples for the "
            f"{machine.ranks_per_node} ranks of a node; give a larger batch"
        )
    by_nodes = [
        min((c for c in candidates if c.nodes == nodes), key=lambda c: c.score)
        for nodes in sorted({c.nodes for c in candidates})
    ]
    pays_up_to = _pays_up_to(by_nodes)
    if math.isfinite(goal.deadline_s):
        eligible = [c for c in candidates if c.seconds <= goal.deadline_s]
        eligible.sort(key=lambda c: c.score * c.nodes)
        reason = "least node-hours within the deadline"
    else:
        eligible = [c for c in candidates if c.nodes <= pays_up_to]
        eligible.sort(key=lambda c: c.score)
        reason = "fastest on a number of nodes that pays"
    if not eligible:
        soonest = min(candidates, key=lambda c: c.seconds)
        raise ConfigError(
            f"the deadline is {goal.deadline_s / 3600:.3g} h and the fastest way takes "
            f"{soonest.seconds / 3600:.3g} h, on {soonest.nodes} nodes; give more nodes, a later "
            f"deadline or another goal"
        )
    best, *others = _unlike_first(eligible)
    return Advice(best, tuple(others[:3]), tuple(by_nodes), pays_up_to, reason)


def _unlike_first(candidates: list[Candidate]) -> list[Candidate]:
    """Put the first with each codec, with and without local steps, before all others."""
    first = {(c.way.codec, c.local_steps > 1): c for c in reversed(candidates)}
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
    for nodes in _numbers_of_nodes(machine.nodes):
        part = replace(machine, nodes=nodes)
        batches = [batch for batch in _batches(goal) if batch >= part.num_ranks]
        # Which way is fastest depends on the size of a message alone, and all buckets have one.
        message = min(model.num_bytes, model.bucket_bytes)
        found = [fastest(part, message, codec) for codec in CODECS]
        for way in found[: 1 if nodes == 1 else None]:
            for batch in batches:
                yield from _by_local_steps(part, model, goal, batch, way)


def _by_local_steps(
    machine: Machine, model: Model, goal: Goal, batch: int, way: Way
) -> Iterator[Candidate]:
    share = batch / machine.num_ranks
    num_steps = goal.samples_at(batch) / batch
    most = min(goal.max_local_steps, most_local_steps(num_steps, machine.num_ranks, share))
    local_steps = 1
    while local_steps == 1 or (local_steps <= most and machine.num_ranks > 1):
        step = step_time(machine, model, share, way, local_steps=local_steps)
        mtbf_s = machine.mtbf_s / machine.nodes
        every_s = daly(machine.checkpoint_s, mtbf_s) if math.isfinite(mtbf_s) else math.inf
        # A checkpoint is taken after a step at the earliest, and after one that holds up nothing.
        every_s = max(every_s, step.total_s)
        left = goodput(every_s, machine.checkpoint_s, machine.restart_s, mtbf_s)
        yield Candidate(machine, batch, way, local_steps, step, num_steps, every_s, left)
        local_steps *= 2


def _numbers_of_nodes(most: int) -> list[int]:
    """Return powers of two and what lies halfway between, and the most there are."""
    numbers = {1 << k for k in range(most.bit_length())}
    return sorted({*(n for n in {*numbers, *(3 * n // 2 for n in numbers)} if n <= most), most})


def _batches(goal: Goal) -> list[int]:
    """Return the goal's batch, and powers of two times it up to 8 noise scales."""
    batches = [goal.batch]
    if math.isinf(goal.noise_scale):
        return batches
    while 2 * batches[-1] <= 8 * goal.noise_scale:
        batches.append(2 * batches[-1])
    return batches
