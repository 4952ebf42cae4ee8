"""Event model of collectives: when each rank of a machine has the result.

The messages are those of ``hpctrain.cost.schedules``, which the ranks carry out; all of a round
are taken at once. A message takes the latency of its link and its bytes over the bandwidth, and
its send is finished when it has arrived. Ports work in both directions at once and carry one
message after the other in each; messages of one round that share a card, or a leaf switch's links
upwards, share its bandwidth.
"""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import ConfigError
from hpctrain.cost.machine import Machine
from hpctrain.cost.schedules import COPY, NOBODY, SCHEDULES, Schedule

Times = NDArray[np.float64]
"""Seconds, one number for each rank."""
_Indices = NDArray[np.int64]

_LOOK_EACH = 32  # equal rounds: whether they have become steady


def allreduce_times(
    algorithm: str, num_bytes: float, machine: Machine, start: Times | None = None
) -> Times:
    """Return when each rank has the sum over all ranks, by messages between all of them.

    Args:
        algorithm: one of ``SCHEDULES``; ``ConfigError`` if it is not.
        num_bytes: length of the message.
        machine: its ranks and links.
        start: when each rank enters; all at 0 if left out.
    """
    return _reduced(algorithm, num_bytes, machine, 0, _started(start, machine))


def two_level_times(
    algorithm: str,
    num_bytes: float,
    machine: Machine,
    start: Times | None = None,
    *,
    rails: int | None = None,
) -> Times:
    """Return the same where the ranks of a node share memory, and nodes are crossed by rails.

    Each rank of a node sums a slice of all its messages; the first ``rails`` of them all-reduce a
    part each with their like on the other nodes; each rank writes its slice into all messages.
    ``rails`` is twice the number of cards if left out, and the ranks of a node at most.
    """
    nodes, peers = machine.nodes, machine.ranks_per_node
    rails = min(peers, rails or 2 * machine.nics)
    others = num_bytes * (peers - 1) / peers  # bytes that a rank reads, and later writes
    copying_s = others / machine.node.bytes_per_s
    combining_s = max(copying_s, others / machine.reduce_bytes_per_s)
    times = _started(start, machine)
    if peers > 1:
        times = _met(times, machine) + combining_s
    if nodes > 1:
        times = _reduced(algorithm, num_bytes / rails, machine, rails, times)
    if peers > 1:
        times = _met(times, machine) + copying_s
    return times


def parameter_server_times(
    num_bytes: float, machine: Machine, start: Times | None = None, *, servers: int = 1
) -> Times:
    """Return when each rank has the sum that servers, on nodes of their own, have formed.

    Each of ``servers`` holds as large a part. All ranks send it theirs, which its card takes one
    after the other; it combines, and sends the sum to them in the same order: the incast.
    """
    begin = _started(start, machine)
    latency_s, bytes_per_s = machine.network.latency_s, machine.network.bytes_per_s
    turn_s = num_bytes / servers / bytes_per_s
    sharing = max(1.0, machine.ranks_per_node / machine.nics)  # ranks at a card of their node
    own_s = num_bytes * sharing / bytes_per_s
    order = np.argsort(begin, kind="stable")
    turns = np.arange(1, len(begin) + 1) * turn_s
    served = np.maximum.accumulate(begin[order] - turns + turn_s) + turns
    arrived = np.maximum(served, begin[order] + own_s) + latency_s
    summed = arrived.max() + num_bytes / servers / machine.reduce_bytes_per_s
    times = np.empty_like(begin)
    times[order] = summed + latency_s + np.maximum(turns, own_s)
    return times


def _started(start: Times | None, machine: Machine) -> Times:
    if start is None:
        return np.zeros(machine.num_ranks)
    if len(start) != machine.num_ranks:
        raise ConfigError(
            f"a start is a time for each rank, got {len(start)} for {machine.num_ranks} ranks"
        )
    return np.asarray(start, dtype=np.float64)


def _met(times: Times, machine: Machine) -> Times:
    """Let the ranks of each node wait for each other."""
    latest = times.reshape(machine.nodes, -1).max(axis=1)
    return np.repeat(latest + machine.node.latency_s, machine.ranks_per_node)


def _reduced(
    algorithm: str, num_bytes: float, machine: Machine, rails: int, start: Times
) -> Times:
    """Let the ranks of each rail have the sum of theirs; with 0 rails, all ranks as one group."""
    if algorithm not in SCHEDULES:
        raise ConfigError(f"an algorithm is one of {', '.join(SCHEDULES)}, got {algorithm!r}")
    members = _members(machine, rails)
    size = members.shape[1]
    if size == 1 or not num_bytes:
        return start
    schedule = SCHEDULES[algorithm]
    num_segments = schedule.num_segments(int(num_bytes), size)
    piece_bytes = num_bytes / (schedule.num_parts(size) * num_segments)
    clocks = _Clocks(start[members].ravel(), piece_bytes, machine.reduce_bytes_per_s)
    for phase in _phases_of(schedule, num_segments, machine, rails):
        clocks.take(phase)
    times = start.copy()
    times[members] = clocks.ready.reshape(members.shape)
    return times


class _Step(NamedTuple):
    """Equal rounds in a row: their messages and what those cost."""

    senders: _Indices  # one for each message; numbers are of members, group by group
    receivers: _Indices | None  # None where every member receives, in order
    latency_s: Times
    s_per_byte: Times  # of a message with its share of what it shares
    num_pieces: int
    combined: bool
    repeats: int


class _Phase(NamedTuple):
    """A phase of a schedule on a machine."""

    steps: list[_Step]
    lead: int
    waits: bool  # in each round for the sends of it


class _Clocks:
    """When each rank is done with what it has done so far, and its ports."""

    def __init__(self, ready: Times, piece_bytes: float, reduce_bytes_per_s: float) -> None:
        self.ready = ready
        self._sent = np.full_like(ready, -np.inf)
        self._received = np.full_like(ready, -np.inf)
        self._delivered = np.full_like(ready, -np.inf)  # what the rank has sent
        self._piece_bytes = piece_bytes
        self._reduce_bytes_per_s = reduce_bytes_per_s

    def take(self, phase: _Phase) -> None:
        """Let all ranks go through a phase."""
        past = deque([self.ready] * phase.lead, maxlen=phase.lead)
        for step in phase.steps:
            self._repeat(step, past, waits=phase.waits)
        self.ready = np.maximum(self.ready, self._delivered)

    def _repeat(self, step: _Step, past: deque[Times], *, waits: bool) -> None:
        senders, latency_s = step.senders, step.latency_s
        num_bytes = step.num_pieces * self._piece_bytes
        sending_s = step.s_per_byte * num_bytes
        combining_s = num_bytes / self._reduce_bytes_per_s if step.combined else 0.0
        # A port takes its next message after the one before.
        ready, to = self.ready, slice(None) if step.receivers is None else step.receivers
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
            if step.receivers is None:
                np.maximum(ready, arrived, out=ready)
                ready += combining_s
            else:
                ready[to] = np.maximum(ready[to], arrived) + combining_s
            if waits:
                ready[senders] = np.maximum(ready[senders], arrived)
            past.append(ready)
            if before and (grown_s := _growth(zip((ready, arrived), before, strict=True))):
                ready += left * grown_s  # as in each of the rounds that are left
                arrived += left * grown_s
                break
        self.ready = ready
        self._sent[senders] = arrived - latency_s
        self._received[to] = arrived
        self._delivered[senders] = np.maximum(self._delivered[senders], arrived)


def _growth(pairs: Iterable[tuple[Times, Times]]) -> float | None:
    """Return by how much all times have grown if they did alike: then they go on like this."""
    grown = [now - before for now, before in pairs]
    least, most = (float(f([f(each) for each in grown])) for f in (np.min, np.max))
    return most if most - least <= 1e-6 * most else None


@lru_cache(maxsize=32)
def _phases_of(
    schedule: Schedule, num_segments: int, machine: Machine, rails: int
) -> tuple[_Phase, ...]:
    """Return what all ranks do; those of each rail at the same time."""
    members = _members(machine, rails)
    size = members.shape[1]
    firsts = np.arange(0, members.size, size)[:, None]  # of each group
    made: dict[int, tuple[_Indices, _Indices | None, Times, Times]] = {}

    def step(equal: _Equal) -> _Step:
        if id(equal.source) not in made:
            places = np.flatnonzero(equal.source != NOBODY)
            senders = (firsts + equal.source[places]).ravel()
            receivers = (firsts + places).ravel()
            costs = _costs(machine, members.ravel()[senders], members.ravel()[receivers])
            made[id(equal.source)] = senders, receivers if len(places) < size else None, *costs
        return _Step(*made[id(equal.source)], *equal[1:])

    return tuple(
        _Phase([step(equal) for equal in rounds], lead, waits)
        for rounds, lead, waits in _equal_rounds(schedule, size, num_segments)
    )


class _Equal(NamedTuple):
    """Equal rounds in a row."""

    source: _Indices  # of each rank of a group, or NOBODY
    num_pieces: int
    combined: bool
    repeats: int


@lru_cache(maxsize=32)
def _equal_rounds(
    schedule: Schedule, size: int, num_segments: int
) -> tuple[tuple[list[_Equal], int, bool], ...]:
    phases = []
    for phase in schedule.phases(np.arange(size), size, num_segments):
        rounds: list[_Equal] = []
        for each in phase.rounds:
            combined = bool(np.all(each.action != COPY))
            last = rounds[-1] if rounds else None
            if last and last.source is each.source and last[1:3] == (each.num_pieces, combined):
                rounds[-1] = last._replace(repeats=last.repeats + 1)
            elif np.any(each.source != NOBODY):
                rounds.append(_Equal(each.source, each.num_pieces, combined, 1))
        phases.append((rounds, phase.lead, not phase.window))
    return tuple(phases)


def _members(machine: Machine, rails: int) -> _Indices:
    """Return the ranks of each group in a row: those of each rail, or all of them."""
    ranks = np.arange(machine.num_ranks)
    return ranks.reshape(machine.nodes, -1)[:, :rails].T if rails else ranks[None]


def _costs(machine: Machine, senders: _Indices, receivers: _Indices) -> tuple[Times, Times]:
    """Return the latency and the seconds per byte of messages that are under way together."""
    node, network = machine.node, machine.network
    (from_node, source), (to_node, dest) = (
        divmod(ranks, machine.ranks_per_node) for ranks in (senders, receivers)
    )
    crosses = from_node != to_node
    s_per_byte = np.where(crosses, 1 / network.bytes_per_s, 1 / node.bytes_per_s)
    ways = [
        (from_node * machine.nics + source % machine.nics, crosses, network.bytes_per_s),
        (to_node * machine.nics + dest % machine.nics, crosses, network.bytes_per_s),
    ]
    latency_s = np.where(crosses, network.latency_s, node.latency_s)
    if machine.leaf_size:
        up, down = from_node // machine.leaf_size, to_node // machine.leaf_size
        latency_s += np.where(up != down, machine.spine_latency_s, 0)
        ways += [(each, up != down, machine.leaf_bytes_per_s) for each in (up, down)]
    for way, used, bytes_per_s in ways:
        load = np.bincount(way[used], minlength=way.max() + 1)[way]
        s_per_byte = np.maximum(s_per_byte, np.where(used, load / bytes_per_s, 0))
    return latency_s, s_per_byte
