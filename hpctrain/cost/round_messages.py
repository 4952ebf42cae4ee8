"""Simulation of a schedule: the messages of each round, the links they share, and their times."""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.cost.machine import Machine, MachineShape
from hpctrain.cost.schedules import COPY, NOBODY, Schedule

Indices = NDArray[np.int64]
Numbers = NDArray[np.float64]
Times = NDArray[np.float64]
"""Seconds, one value per rank."""

_LOOK_EACH = 32  # every 32 equal rounds, a check whether their duration has become constant


class Messages(NamedTuple):
    """Concurrent messages of a round, at most one from each rank."""

    senders: Indices  # indices into the flattened array ``members``
    receivers: Indices | None  # None if every member receives, in order
    crosses: Numbers  # 1 for a message that leaves its node, else 0
    climbs: Numbers  # 1 for a message that leaves its leaf switch
    width: Numbers
    """Factor by which concurrent messages on the same link slow down a message between nodes."""


class Step(NamedTuple):
    """Consecutive rounds with equal messages."""

    messages: Messages
    num_pieces: int
    combined: bool  # whether receivers combine the pieces with their data
    repeats: int  # number of rounds


SchedulePhase = tuple[list[Step], int, bool]
"""Steps of a phase, ``lead`` of the phase, and True if each round waits for its own sends."""


def members(machine: MachineShape, rails: int) -> Indices:
    """Return the groups of ranks that reduce between nodes, one group per row.

    Each rail is a group. Without rails, all ranks are one group.
    """
    ranks = np.arange(machine.num_ranks)
    return ranks.reshape(machine.nodes, -1)[:, :rails].T if rails else ranks[None]


@lru_cache(maxsize=64)
def phases(
    schedule: Schedule, num_segments: int, machine: MachineShape, rails: int
) -> list[SchedulePhase]:
    """Return the phases of a schedule for the simulation; all rails communicate concurrently."""
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
    """Return the messages of a round; member i of each group receives from ``source[i]``."""
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


class Clocks:
    """Simulated time at which each rank, and each of its ports, becomes idle."""

    def __init__(self, ready: Times, piece_bytes: float, machine: Machine, turns: float) -> None:
        self._ready = ready
        self._sent = np.full_like(ready, -np.inf)
        self._received = np.full_like(ready, -np.inf)
        self._delivered = np.full_like(ready, -np.inf)  # when sent messages have arrived
        self._piece_bytes = piece_bytes
        self._machine, self._turns = machine, turns

    def take(self, phases: Iterable[SchedulePhase]) -> Times:
        """Advance the clocks by all rounds of a schedule; return the time of each rank."""
        for steps, lead, waits in phases:
            past = deque([self._ready] * lead, maxlen=lead)
            for step in steps:
                self._repeat(step, past, waits=waits)
            self._ready = np.maximum(self._ready, self._delivered)
        return self._ready

    def _repeat(self, step: Step, past: deque[Times], *, waits: bool) -> None:
        machine, turns, messages = self._machine, self._turns, step.messages
        senders, crosses = messages.senders, messages.crosses
        num_bytes = step.num_pieces * self._piece_bytes
        inside, outside = machine.node, machine.network
        latency_s = turns * (inside.latency_s + crosses * (outside.latency_s - inside.latency_s))
        latency_s += messages.climbs * machine.spine_latency_s
        within_s = turns / inside.bytes_per_s
        across_s = messages.width / outside.bytes_per_s + turns / machine.handle_bytes_per_s
        sending_s = num_bytes * np.where(crosses, across_s, within_s)
        combining_s = num_bytes * turns / machine.reduce_bytes_per_s if step.combined else 0.0
        # A port sends its next message after the previous one.
        all_receive, ready = messages.receivers is None, self._ready
        to: Any = slice(None) if all_receive else messages.receivers
        arrived = np.maximum(self._sent[senders] + latency_s, self._received[to])
        for left in reversed(range(step.repeats)):
            looks = left % _LOOK_EACH == 1 and len(past) == 1 and left < step.repeats - 1
            before = (ready.copy(), arrived) if looks else None
            begin = past[0].take(senders)
            begin += latency_s
            arrived = np.maximum(begin, arrived, out=begin)
            arrived += sending_s
            if len(past) > 1:
                ready = ready.copy()
            if all_receive:
                np.maximum(ready, arrived, out=ready)
                ready += combining_s
            else:
                ready[to] = np.maximum(ready[to], arrived) + combining_s
            if waits:
                ready[senders] = np.maximum(ready[senders], arrived)
            past.append(ready)
            if before and (grown_s := _growth(zip((ready, arrived), before, strict=True))):
                ready += left * grown_s  # each remaining round takes as long as this one
                arrived += left * grown_s
                break
        self._ready = ready
        self._sent[senders] = arrived - latency_s
        self._received[to] = arrived
        self._delivered[senders] = np.maximum(self._delivered[senders], arrived)


def _growth(pairs: Iterable[tuple[Times, Times]]) -> float | None:
    """Return the increase of the times in a round if all ranks have the same, else None.

    If all ranks have the same increase, all later rounds of this kind take the same time.
    """
    grown = [now - before for now, before in pairs]
    least, most = (float(f([f(each) for each in grown])) for f in (np.min, np.max))
    return most if most - least <= 1e-6 * most else None
