"""Concurrent messages of the rounds of a schedule, and the links that the messages share."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.cost.machine import MachineShape
from hpctrain.cost.schedules import COPY, NOBODY, Schedule

Indices = NDArray[np.int64]
Numbers = NDArray[np.float64]


class Messages(NamedTuple):
    """Concurrent messages of a round, at most one from each rank."""

    senders: Indices  # index into ``members``, group by group
    receivers: Indices | None  # None if every member receives, in order
    crosses: Numbers  # 1 for a message that leaves its node, else 0
    climbs: Numbers  # 1 for a message that leaves its leaf switch
    width: Numbers
    """Slowdown of a message between nodes by concurrent messages on the same link."""


class Step(NamedTuple):
    """Consecutive rounds with equal messages."""

    messages: Messages
    num_pieces: int
    combined: bool  # whether receivers combine the pieces with their data
    repeats: int  # number of rounds


def members(machine: MachineShape, rails: int) -> Indices:
    """Return the groups of ranks that reduce between nodes, one per row: rails or all ranks."""
    ranks = np.arange(machine.num_ranks)
    return ranks.reshape(machine.nodes, -1)[:, :rails].T if rails else ranks[None]


@lru_cache(maxsize=64)
def phases(
    schedule: Schedule, num_segments: int, machine: MachineShape, rails: int
) -> list[tuple[list[Step], int, bool]]:
    """Return the phases of a schedule for the simulation.

    All rails communicate concurrently.

    Returns:
        For each phase: its steps, its ``lead``, and True if each round waits for its own sends.
    """
    groups = members(machine, rails)
    size = groups.shape[1]
    made: dict[int, tuple[Indices, Messages]] = {}  # by ``id`` of the array of sources
    found = []
    for phase in schedule.phases(np.arange(size), size, num_segments):
        steps = []
        for each, repeats in phase.timed():
            if id(each.source) not in made:
                made[id(each.source)] = each.source, _messages(each.source, groups, machine)
            messages = made[id(each.source)][1]
            if len(messages.senders):
                combined = bool(np.all(each.action != COPY))
                steps.append(Step(messages, each.num_pieces, combined, repeats))
        found.append((steps, phase.lead, not phase.window))
    return found


def _messages(source: Indices, groups: Indices, machine: MachineShape) -> Messages:
    """Return the messages of a round, in which each member of a group receives from ``source``."""
    firsts = np.arange(0, groups.size, groups.shape[1])[:, None]
    to = np.flatnonzero(source != NOBODY)
    senders, receivers = (firsts + source[to]).ravel(), (firsts + to).ravel()
    ends = [
        np.divmod(groups.ravel()[each], machine.ranks_per_node) for each in (senders, receivers)
    ]
    crosses = ends[0][0] != ends[1][0]
    shared = [(node * machine.nics + local % machine.nics, crosses, 1.0) for node, local in ends]
    climbs = np.zeros_like(crosses)
    if machine.leaf_size:
        leaves = [node // machine.leaf_size for node, _ in ends]
        climbs = leaves[0] != leaves[1]
        cards = machine.leaf_size * machine.nics / machine.oversubscription
        shared += [(leaf, climbs, cards) for leaf in leaves]
    width = np.ones(len(senders))
    for link, used, cards in shared:
        load = np.bincount(link[used], minlength=groups.size * machine.nics)[link]
        width = np.maximum(width, np.where(used, load / cards, 0))
    receivers_or_none = None if len(to) == groups.shape[1] else receivers
    return Messages(senders, receivers_or_none, 1.0 * crosses, 1.0 * climbs, width)
