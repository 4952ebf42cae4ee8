"""Closed forms of sums over all ranks: what each asks of links and processors, and the least.

Sources: those of ``hpctrain.cost.schedules``; of the least, Chan et al. 2007, "Collective
communication: theory, practice, and experience".
"""

import math
import operator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

from hpctrain.core.errors import ConfigError
from hpctrain.cost.machine import Machine, MachineShape
from hpctrain.cost.round_messages import phases
from hpctrain.cost.schedules import SCHEDULES


class Load(NamedTuple):
    """What a sum asks of the rank or link that is busy longest, one after the other.

    Its time is linear in the figures of a machine, so these are fitted to measured times. What
    processors do counts as many times as ranks take turns on a core.
    """

    node_rounds: float = 0.0  # messages inside a node
    node_bytes: float = 0.0
    network_rounds: float = 0.0  # messages between nodes
    network_bytes: float = 0.0  # through one network card, in one direction
    handled_bytes: float = 0.0  # of those, by one rank's processor
    combined_bytes: float = 0.0  # of one of two tensors, by one rank
    codec_s: float = 0.0  # seconds that a codec takes on any machine

    def __add__(self, other: "Load") -> "Load":  # type: ignore[override] # not a longer tuple
        return Load(*map(operator.add, self, other))

    def seconds(self, machine: Machine) -> float:
        """Return the time on a machine."""
        return float(sum(map(operator.mul, self, seconds_of_one(machine))))


def seconds_of_one(machine: Machine) -> Load:
    """Return the seconds for one of each field of a load."""
    node, network = machine.node, machine.network
    links = node.latency_s, 1 / node.bytes_per_s, network.latency_s, 1 / network.bytes_per_s
    return Load(*links, 1 / machine.handle_bytes_per_s, 1 / machine.reduce_bytes_per_s, 1.0)


class CodecCost(NamedTuple):
    """What a codec does to a message of float32."""

    bytes_per_element: float  # that travel, of 4
    s_per_byte: float = 0.0  # processor time for each byte of the message, both ways
    passes: float = 0.0  # as many times a rank goes over what it sends, besides combining it


CODECS = {
    "none": CodecCost(4.0),
    "fp16": CodecCost(2.0, passes=2.0),
    "bf16": CodecCost(2.0, passes=2.0),
}
"""By name, those of ``hpctrain.Compression``."""


def codec_cost(name: str) -> CodecCost:
    """Return what a codec costs: one of ``CODECS``, or ``NAME:BYTES:SECONDS``.

    The latter says what no row of the table does: the bytes for each element, and the seconds of a
    processor for each byte of the message. Raises ``ConfigError``: it is neither.
    """
    if name in CODECS:
        return CODECS[name]
    try:
        _, size, seconds = name.split(":")
        found = CodecCost(float(size), float(seconds))
    except ValueError:
        found = CodecCost(0.0)
    if not (0 < found.bytes_per_element < math.inf and 0 <= found.s_per_byte < math.inf):
        raise ConfigError(
            f"a codec of a model is one of {', '.join(CODECS)}, or NAME:BYTES:SECONDS such as "
            f"int8:1:2e-10, bytes of an element and seconds for a byte, got {name!r}"
        )
    return found


@dataclass(frozen=True, slots=True)
class Way:
    """How all ranks sum a message; ``ConfigError`` if it has no such name."""

    algorithm: str
    """A name of ``schedules.SCHEDULES``; on one node with rails also ``slices`` or ``direct``."""
    rails: int = 0
    """Ranks of each node that sum their parts between nodes, after the node has summed in its
    memory; 0 where the algorithm runs flat over all ranks."""
    codec: str = "none"  # what ``codec_cost`` takes, for what travels between nodes

    def __post_init__(self) -> None:
        known = [*SCHEDULES, *(ON_A_NODE if self.rails else ())]
        if self.algorithm not in known:
            raise ConfigError(
                f"an algorithm of a model is one of {', '.join(known)}, got {self.algorithm!r}"
            )
        codec_cost(self.codec)

    def __str__(self) -> str:
        levels = f"{self.rails} rail{'s' * (self.rails > 1)}" if self.rails else "flat"
        return f"{self.algorithm}, {levels}{f', {self.codec}' * (self.codec != 'none')}"


ON_A_NODE = ("slices", "direct")


def allreduce(machine: Machine, num_bytes: float, way: Way) -> Load:
    """Return the load of a sum over all ranks of a machine; its links do not matter.

    Ranks are numbered node by node. Inside a node every rank sums a slice of the message, or all
    of it if ``direct``, out of memory that all of them read: no message passes there but by flat
    algorithms. What shares a card waits for it.
    """
    before, after = around(machine, num_bytes, way)
    rails, sent = between_nodes(machine, num_bytes, way)
    if (machine.nodes if rails else machine.num_ranks) == 1:
        return before + after
    shape = MachineShape(
        **{each.name: getattr(machine, each.name) for each in fields(MachineShape)}
    )
    of_messages = _double_tree if way.algorithm == "double_tree" else _in_rounds
    return before + of_messages(sent, way.algorithm, shape, rails) + after


def _in_rounds(num_bytes: float, algorithm: str, shape: MachineShape, rails: int) -> Load:
    """Add up the rounds of a schedule; of those under way together the slowest counts."""
    each = _of_one_byte(algorithm, shape, rails)._asdict().items()
    return Load(*(many if "rounds" in name else many * num_bytes for name, many in each))


@lru_cache(maxsize=1024)
def _of_one_byte(algorithm: str, shape: MachineShape, rails: int) -> Load:
    schedule, total = SCHEDULES[algorithm], Load()
    num_parts = schedule.num_parts(shape.nodes if rails else shape.num_ranks)
    for steps, _, _ in phases(schedule, 1, shape, rails):
        for messages, num_pieces, combined, repeats in steps:
            part = repeats * num_pieces / num_parts
            width = float((messages.width * messages.crosses).max())
            total += _asked(shape, rails, repeats, part, width, part * combined)
    return total


def _asked(
    shape: MachineShape, rails: int, rounds: float, num_bytes: float, width: float, combined: float
) -> Load:
    """Return the load of rounds; a width of 0 says that none of them leaves a node."""
    turns = shape.turns(rails or shape.ranks_per_node)
    both = Load(combined_bytes=turns * combined)
    if not width:
        return both + Load(turns * rounds, turns * num_bytes)
    return both + Load(0, 0, turns * rounds, width * num_bytes, turns * num_bytes)


def _double_tree(num_bytes: float, algorithm: str, shape: MachineShape, rails: int) -> Load:
    """Return what a rank inside one of two trees waits for: it is a leaf of the other."""
    size = shape.nodes if rails else shape.num_ranks
    depth = (size - 1).bit_length()
    segment = min(SCHEDULES[algorithm].segment_bytes, num_bytes / 2)
    # An inner rank takes a segment from each child; the others follow the first.
    up = 2 * depth * segment + 2 * min(2, size - 1) * (num_bytes / 2 - segment)
    width = math.ceil((rails or 1) / shape.nics) if shape.nodes > 1 else 0
    return _asked(shape, rails, 4 * depth, 2 * up, width, up)


def between_nodes(machine: Machine, num_bytes: float, way: Way) -> tuple[int, float]:
    """Return the rails of each node, and the bytes of a message that ranks sum by messages."""
    if way.algorithm in ON_A_NODE and machine.nodes > 1:
        raise ConfigError(f"{way.algorithm} sums on one node, got {machine.nodes}; name another")
    rails = min(way.rails, machine.ranks_per_node)
    return rails, codec_cost(way.codec).bytes_per_element / 4 * num_bytes / (rails or 1)


def around(machine: Machine, num_bytes: float, way: Way) -> tuple[Load, Load]:
    """Return what ranks do before they send and afterwards: a codec, and the memory of a node."""
    local, codec, before, after = machine.ranks_per_node, codec_cost(way.codec), Load(), Load()
    rails = min(way.rails, local)
    if machine.nodes > 1 or (local > 1 and not rails):
        coded = machine.turns(rails or local) * num_bytes / (rails or 1) / 2
        before = Load(combined_bytes=codec.passes * coded, codec_s=codec.s_per_byte * coded)
        after = before
    if rails:
        turns, depth = machine.turns(local), (local - 1).bit_length()
        if way.algorithm == "direct":
            return Load(turns * depth, combined_bytes=turns * (local - 1) * num_bytes), Load()
        part = Load(turns * depth, combined_bytes=turns * (local - 1) / local * num_bytes)
        before, after = part + Load(turns * depth) + before, after + part
    return before, after


def fastest(machine: Machine, num_bytes: float, codec: str = "none") -> Way:
    """Return the way of two levels that takes least time: which algorithm, how many rails."""
    local = machine.ranks_per_node
    if machine.nodes == 1:
        return Way("slices", rails=1)
    rails = sorted({1, min(machine.nics, local), min(2 * machine.nics, local), local})
    ways = [Way(name, many, codec) for name in SCHEDULES for many in rails]
    return min(ways, key=lambda way: allreduce(machine, num_bytes, way).seconds(machine))


def bound(machine: Machine, num_bytes: float) -> Load:
    """Return what no way to sum goes below: of N nodes each sends 2(N-1)/N of the message.

    And no result is known to all before log2 N messages have followed each other. On one node,
    the same of its ranks.
    """
    size = machine.nodes if machine.nodes > 1 else machine.ranks_per_node
    rounds, sent = math.ceil(math.log2(size)), 2 * (size - 1) / size * num_bytes
    if machine.nodes > 1:
        return Load(network_rounds=rounds, network_bytes=sent / machine.nics)
    return Load(node_rounds=rounds, node_bytes=sent)


def parameter_server(
    machine: Machine, num_bytes: float, servers: int, *, largest: float = 0.0
) -> Load:
    """Return what the busiest of the servers takes in, and as much again goes out of it.

    Every rank sends it its share of the gradients and gets back as much of the parameters.
    Servers lie on nodes that train too, one on each at most; ``largest`` is the largest tensor
    in bytes, which no two servers share.
    """
    if not 1 <= servers <= machine.nodes:
        raise ConfigError(
            f"servers lie on nodes, one on each at most, got {servers} for {machine.nodes} nodes"
        )
    share = max(num_bytes / servers, largest)
    sent = (machine.num_ranks - machine.ranks_per_node) * share
    return Load(0, 0, 1, sent / machine.nics, sent, machine.num_ranks * share)
