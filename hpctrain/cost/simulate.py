"""Simulation of all-reduces: the time at which each rank of a machine has the result.

The messages are defined in ``hpctrain.cost.schedules``, which the ranks execute; all messages of a
round are simulated together. A message takes the latency of its link plus its bytes over the
bandwidth, and a send ends when the message has arrived. Ports are full duplex and send one message
after the other in each direction; messages of a round share the bandwidth of a common NIC, or of
the uplinks of a common leaf switch.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import ConfigError
from hpctrain.cost.collectives import AllreduceSpec, around, between_nodes
from hpctrain.cost.machine import Machine
from hpctrain.cost.round_messages import Step, members, phases
from hpctrain.cost.schedules import SCHEDULES

Times = NDArray[np.float64]
"""Seconds, one value per rank."""

_LOOK_EACH = 32  # number of rounds between two checks for a constant duration of equal rounds


def allreduce_times(
    spec: AllreduceSpec, num_bytes: float, machine: Machine, start: Times | None = None
) -> Times:
    """Return the time at which each rank has the sum over all ranks.

    The times of codec and node memory, before and after the messages between nodes, are computed
    by ``collectives.around``. Ranks of a node synchronize before and after these messages.

    Args:
        spec: algorithm, rails and codec.
        num_bytes: length of the message.
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
        clocks = _Clocks(times[groups].ravel(), piece_bytes, machine, turns)
        for steps, lead, waits in phases(schedule, num_segments, machine, rails):
            clocks.take(steps, lead, waits=waits)
        times[groups] = clocks.ready.reshape(groups.shape)
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


class _Clocks:
    """Simulated time at which each rank, and each of its ports, becomes idle."""

    def __init__(self, ready: Times, piece_bytes: float, machine: Machine, turns: float) -> None:
        self.ready = ready
        self._sent = np.full_like(ready, -np.inf)
        self._received = np.full_like(ready, -np.inf)
        self._delivered = np.full_like(ready, -np.inf)  # arrival of sent messages
        self._piece_bytes = piece_bytes
        self._machine, self._turns = machine, turns

    def take(self, steps: list[Step], lead: int, *, waits: bool) -> None:
        """Advance the clocks of all ranks by the rounds of a phase."""
        past = deque([self.ready] * lead, maxlen=lead)
        for step in steps:
            self._repeat(step, past, waits=waits)
        self.ready = np.maximum(self.ready, self._delivered)

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
        all_receive, ready = messages.receivers is None, self.ready
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
        self.ready = ready
        self._sent[senders] = arrived - latency_s
        self._received[to] = arrived
        self._delivered[senders] = np.maximum(self._delivered[senders], arrived)


def _growth(pairs: Iterable[tuple[Times, Times]]) -> float | None:
    """Return the increase of all times in a round, or None if the increases differ.

    After an equal increase, all later rounds of this kind take the same time.
    """
    grown = [now - before for now, before in pairs]
    least, most = (float(f([f(each) for each in grown])) for f in (np.min, np.max))
    return most if most - least <= 1e-6 * most else None
