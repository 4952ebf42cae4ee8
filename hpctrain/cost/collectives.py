"""Closed-form costs of all-reduces: load of links and processors, and lower bounds.

Sources: see ``hpctrain.cost.schedules``; for the lower bound, Chan et al. 2007, "Collective
communication: theory, practice, and experience".
"""

import math
import operator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hpctrain.core.errors import ConfigError
from hpctrain.cost.machine import Link, Machine, MachineShape
from hpctrain.cost.round_messages import Clocks, phases
from hpctrain.cost.schedules import SCHEDULES


class Load(NamedTuple):
    """Messages, bytes and seconds of the busiest rank or link in an all-reduce.

    The time of the operation is the sum over all fields, each multiplied by a parameter of the
    machine: the model assumes no overlap. The time is linear in the parameters, so the parameters
    can be fitted to measured times. The work of processors is multiplied by the number of ranks
    that share a core.
    """

    node_rounds: float = 0.0  # messages inside a node
    node_bytes: float = 0.0
    network_rounds: float = 0.0  # messages between nodes
    network_bytes: float = 0.0  # through one NIC, in one direction
    handled_bytes: float = 0.0  # network bytes that the processor of a rank copies
    combined_bytes: float = 0.0  # bytes of one tensor that a rank combines with another tensor
    codec_s: float = 0.0  # time of the codec, equal on all machines

    def __add__(self, other: "Load") -> "Load":  # type: ignore[override] # no concatenation
        return Load(*map(operator.add, self, other))

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of this load on a machine."""
        return float(sum(map(operator.mul, self, seconds_of_one(machine))))


def seconds_of_one(machine: Machine) -> Load:
    """Return, for each field of ``Load``, the seconds that one unit takes on a machine."""
    node, network = machine.node, machine.network
    links = node.latency_s, 1 / node.bytes_per_s, network.latency_s, 1 / network.bytes_per_s
    return Load(*links, 1 / machine.handle_bytes_per_s, 1 / machine.reduce_bytes_per_s, 1.0)


class CodecCost(NamedTuple):
    """Bytes and processor time of a codec, for a message of float32 elements."""

    bytes_per_element: float  # bytes sent for an element of 4 bytes
    s_per_byte: float = 0.0  # time per byte of the message, to encode and decode
    passes: float = 0.0  # additional passes of a rank over the bytes that it sends


CODECS = {
    "none": CodecCost(4.0),
    "fp16": CodecCost(2.0, passes=2.0),
    "bf16": CodecCost(2.0, passes=2.0),
}
"""Costs of codecs by name, as in ``hpctrain.Compression``."""


def codec_cost(name: str) -> CodecCost:
    """Return the cost of a codec: one of ``CODECS``, or ``NAME:BYTES:SECONDS``.

    BYTES is the encoded size of an element; SECONDS is the processor time per byte of message.

    Raises:
        ConfigError: the name has neither form.
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
            f"a codec must be one of {', '.join(CODECS)}, or NAME:BYTES:SECONDS with bytes per "
            f"element and seconds per byte, such as int8:1:2e-10, got {name!r}"
        )
    return found


@dataclass(frozen=True, slots=True)
class AllreduceSpec:
    """Algorithm, rails and codec of an all-reduce.

    Raises:
        ConfigError: the name of the algorithm or of the codec is unknown.
    """

    algorithm: str
    """A name of ``schedules.SCHEDULES``; on one node with rails also ``slices`` or ``direct``."""
    rails: int = 0
    """Number of ranks per node that reduce slices between nodes, after the reduction in node
    memory; 0 for a flat algorithm."""
    codec: str = "none"  # codec of messages between nodes, see ``codec_cost``

    def __post_init__(self) -> None:
        known = [*SCHEDULES, *(ON_A_NODE if self.rails else ())]
        if self.algorithm not in known:
            raise ConfigError(
                f"an algorithm must be one of {', '.join(known)}, got {self.algorithm!r}"
            )
        codec_cost(self.codec)

    def __str__(self) -> str:
        levels = f"{self.rails} rail{'s' * (self.rails > 1)}" if self.rails else "flat"
        return f"{self.algorithm}, {levels}{f', {self.codec}' * (self.codec != 'none')}"


ON_A_NODE = ("slices", "direct")


def allreduce(machine: Machine, num_bytes: float, spec: AllreduceSpec) -> Load:
    """Return the load of an all-reduce over all ranks; independent of the speed of links.

    Ranks of a node are consecutive. Inside a node every rank sums a slice of the message in shared
    memory, or the whole message with the algorithm ``direct``; only flat algorithms send messages
    inside a node. Messages that share a NIC are sent one after the other.
    """
    before, after = around(machine, num_bytes, spec)
    rails, sent = between_nodes(machine, num_bytes, spec)
    if (machine.nodes if rails else machine.num_ranks) == 1:
        return before + after
    shape = MachineShape(
        **{each.name: getattr(machine, each.name) for each in fields(MachineShape)}
    )
    of_messages = _double_tree if spec.algorithm == "double_tree" else _in_rounds
    return before + of_messages(sent, spec.algorithm, shape, rails) + after


def _in_rounds(num_bytes: float, algorithm: str, shape: MachineShape, rails: int) -> Load:
    """Return the load of an algorithm that has rounds: the sum of each round's slowest message."""
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
            total += _load_of(shape, rails, repeats, part, width, part * combined)
    return total


def _load_of(
    shape: MachineShape, rails: int, rounds: float, num_bytes: float, width: float, combined: float
) -> Load:
    """Return the load of ``rounds`` rounds, which send and combine the given numbers of bytes.

    ``width`` is the factor by which concurrent messages on the same link slow down a message
    between nodes; 0 if no message leaves a node.
    """
    turns = shape.turns(rails or shape.ranks_per_node)
    both = Load(combined_bytes=turns * combined)
    if not width:
        return both + Load(turns * rounds, turns * num_bytes)
    return both + Load(0, 0, turns * rounds, width * num_bytes, turns * num_bytes)


def _double_tree(num_bytes: float, algorithm: str, shape: MachineShape, rails: int) -> Load:
    """Return the load of the slowest path through both trees."""
    size = shape.nodes if rails else shape.num_ranks
    num_segments = SCHEDULES[algorithm].num_segments(math.ceil(num_bytes), size)
    rounds, sent, combined = _slowest_path(algorithm, size, num_segments)
    piece_bytes = num_bytes / 2 / num_segments
    width = math.ceil((rails or 1) / shape.nics) if shape.nodes > 1 else 0
    return _load_of(shape, rails, rounds, sent * piece_bytes, width, combined * piece_bytes)


_MOST_SIZE, _MOST_SEGMENTS = 512, 16  # ranks and segments of a simulated double tree


@lru_cache(maxsize=1024)
def _slowest_path(algorithm: str, size: int, num_segments: int) -> tuple[float, float, float]:
    """Return the numbers of latencies, sent pieces and combined pieces on the slowest path.

    Three simulations give the numbers: in the first only latency takes time, in the second only
    sending, in the third sending and combining. For many ranks or segments the numbers are
    extrapolated: each doubling of the ranks adds a level to both trees, and each segment adds a
    constant.
    """
    if size > _MOST_SIZE:  # the remainder determines the shape of the trees
        fewer = _slowest_path(algorithm, size // 256 * 128 + size % 128, num_segments)
        return fewer[0] + 2, fewer[1] + 4, fewer[2] + 4 / 3
    if num_segments > _MOST_SEGMENTS:
        half = _MOST_SEGMENTS // 2
        more, less = (_slowest_path(algorithm, size, many) for many in (2 * half, half))
        factor = (num_segments - 2 * half) / half
        a, b, c = (x + factor * (x - y) for x, y in zip(more, less, strict=True))
        return a, b, c

    def slowest_s(latency_s: float, bytes_per_s: float, combine_per_s: float = math.inf) -> float:
        link = Link(latency_s, bytes_per_s)
        machine = Machine(nodes=size, network=link, reduce_bytes_per_s=combine_per_s)
        steps = phases(SCHEDULES[algorithm], num_segments, machine, 0)
        return float(Clocks(np.zeros(size), 1.0, machine, 1.0).take(steps).max())

    sent = slowest_s(0.0, 1.0)
    # Here combining takes 3/2 of the time of sending. The resulting number of combined pieces is
    # also accurate if combining is faster or slower than that.
    return slowest_s(1.0, math.inf), sent, (slowest_s(0.0, 1.0, 2 / 3) - sent) * 2 / 3


def between_nodes(machine: Machine, num_bytes: float, spec: AllreduceSpec) -> tuple[int, float]:
    """Return the number of rails per node, and the bytes that each rail reduces between nodes."""
    if spec.algorithm in ON_A_NODE and machine.nodes > 1:
        raise ConfigError(
            f"{spec.algorithm} can only run on one node, got {machine.nodes}; choose another "
            "algorithm"
        )
    rails = min(spec.rails, machine.ranks_per_node)
    return rails, codec_cost(spec.codec).bytes_per_element / 4 * num_bytes / (rails or 1)


def around(machine: Machine, num_bytes: float, spec: AllreduceSpec) -> tuple[Load, Load]:
    """Return the loads of codec and node memory, before and after the messages between nodes."""
    local, codec, before, after = machine.ranks_per_node, codec_cost(spec.codec), Load(), Load()
    rails = min(spec.rails, local)
    if machine.nodes > 1 or (local > 1 and not rails):
        coded = machine.turns(rails or local) * num_bytes / (rails or 1) / 2
        before = Load(combined_bytes=codec.passes * coded, codec_s=codec.s_per_byte * coded)
        after = before
    if rails:
        turns, depth = machine.turns(local), (local - 1).bit_length()
        if spec.algorithm == "direct":
            return Load(turns * depth, combined_bytes=turns * (local - 1) * num_bytes), Load()
        part = Load(turns * depth, combined_bytes=turns * (local - 1) / local * num_bytes)
        before, after = part + Load(turns * depth) + before, after + part
    return before, after


def fastest(machine: Machine, num_bytes: float, codec: str = "none") -> AllreduceSpec:
    """Return the fastest algorithm with its number of rails; on one node always ``slices``."""
    local = machine.ranks_per_node
    if machine.nodes == 1:
        return AllreduceSpec("slices", rails=1)
    rails = sorted({1, min(machine.nics, local), min(2 * machine.nics, local), local})
    specs = [AllreduceSpec(name, many, codec) for name in SCHEDULES for many in rails]
    return min(specs, key=lambda spec: allreduce(machine, num_bytes, spec).seconds(machine))


def bound(machine: Machine, num_bytes: float) -> Load:
    """Return a lower bound of the load that every all-reduce algorithm has.

    Each of N nodes sends at least 2(N-1)/N of the message, in at least log2 N rounds. On one node,
    N is the number of ranks.
    """
    size = machine.nodes if machine.nodes > 1 else machine.ranks_per_node
    rounds, sent = math.ceil(math.log2(size)), 2 * (size - 1) / size * num_bytes
    if machine.nodes > 1:
        return Load(network_rounds=rounds, network_bytes=sent / machine.nics)
    return Load(node_rounds=rounds, node_bytes=sent)


def parameter_server(
    machine: Machine, num_bytes: float, servers: int, *, largest: float = 0.0
) -> Load:
    """Return the load of the busiest parameter server, which receives as many bytes as it sends.

    Every rank sends a share of the gradients to each server, and receives as many bytes of
    parameters from this server. Servers run on nodes that also train, at most one per node. Each
    tensor is stored on a single server, so a share has at least the size of the largest tensor,
    ``largest`` in bytes.
    """
    if not 1 <= servers <= machine.nodes:
        raise ConfigError(
            f"servers must be between 1 and the {machine.nodes} nodes, got {servers}"
        )
    share = max(num_bytes / servers, largest)
    sent = (machine.num_ranks - machine.ranks_per_node) * share
    return Load(0, 0, 1, sent / machine.nics, sent, machine.num_ranks * share)
