"""Closed forms of sums over all ranks: what each asks of links and processors, and the least."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.core.errors import ConfigError
from hpctrain.cost.machine import Machine
from hpctrain.cost.schedules import SCHEDULES


class Load(NamedTuple):
    """What a sum asks of the rank or link that is busy longest, one after the other.

    Its time is linear in the figures of a machine, so these are fitted to measured times.
    """

    node_rounds: float = 0.0  # messages inside a node
    node_bytes: float = 0.0
    network_rounds: float = 0.0  # messages between nodes
    network_bytes: float = 0.0  # through one network card, in one direction
    combined_bytes: float = 0.0  # of one of two tensors, by one rank

    def __add__(self, other: "Load") -> "Load":  # type: ignore[override] # not a longer tuple
        return Load(*map(operator.add, self, other))

    def seconds(self, machine: Machine) -> float:
        """Return the time on a machine."""
        node, network = machine.node, machine.network
        return (
            self.node_rounds * node.latency_s
            + self.node_bytes / node.bytes_per_s
            + self.network_rounds * network.latency_s
            + self.network_bytes / network.bytes_per_s
            + self.combined_bytes / machine.reduce_bytes_per_s
        )


class CodecCost(NamedTuple):
    """What a codec does to a message."""

    ratio: float  # bytes that travel, by those of the message
    passes: float  # as many times a rank goes over what it sends, besides combining it


CODECS = {"none": CodecCost(1.0, 0.0), "bf16": CodecCost(0.5, 2.0)}
"""By name: ``hpctrain.Compression`` has both."""


@dataclass(frozen=True, slots=True)
class Way:
    """How all ranks sum a message; ``ConfigError`` if it has no such name."""

    algorithm: str
    """A name of ``ALGORITHMS``; on one node with rails also ``slices`` or ``direct``."""
    rails: int = 0
    """Ranks of each node that sum their parts between nodes, after the node has summed in its
    memory; 0 where the algorithm runs flat over all ranks."""
    codec: str = "none"  # a name of ``CODECS``, for what travels between nodes

    def __post_init__(self) -> None:
        names = [*ALGORITHMS, *(ON_A_NODE if self.rails else ())]
        for what, name, known in (
            ("an algorithm", self.algorithm, names),
            ("a codec", self.codec, CODECS),
        ):
            if name not in known:
                raise ConfigError(f"{what} of a model is one of {', '.join(known)}, got {name!r}")

    def __str__(self) -> str:
        levels = f"{self.rails} rail{'s' * (self.rails > 1)}" if self.rails else "flat"
        return f"{self.algorithm}, {levels}{f', {self.codec}' * (self.codec != 'none')}"


class _Round(NamedTuple):
    """Messages that travel at the same time."""

    reach: int  # how many ranks further on the partner is
    num_bytes: float  # of each message
    times: float = 1
    kind: str = "pairs"
    """``pairs``: all exchange with a partner; ``folded``: so do those that take part for their
    neighbours too, which lie twice as far apart, and the others; ``shift``: all send to the one
    ``reach`` further on; ``tree``: one of each ``2 reach`` sends."""
    combines: bool = False  # whether what arrives is combined with what is there

    def leaving(self, block: int) -> int:
        """Count the messages that leave a block of so many consecutive ranks, in a direction."""
        if self.kind == "folded":
            near = self._replace(kind="pairs")
            far = near._replace(reach=2 * self.reach)
            return max(near.leaving(block), math.ceil(far.leaving(block) / 2))
        if self.kind != "shift" and block % (2 * self.reach) == 0:
            return 0
        return 1 if self.kind == "tree" else min(self.reach, block)


def _ring(size: int, num_bytes: float) -> list[_Round]:
    part = _Round(1, num_bytes / size, size - 1, "shift")
    return [part._replace(combines=True), part]


def _paired(size: int) -> list[_Round]:
    """Return rounds of nothing at 1, 2, 4, ... below the largest power of two within ``size``."""
    kind = "folded" if size & (size - 1) else "pairs"
    return [_Round(1 << k, 0.0, kind=kind) for k in range(size.bit_length() - 1)]


def _doubling(size: int, num_bytes: float) -> list[_Round]:
    rounds = [each._replace(num_bytes=num_bytes, combines=True) for each in _paired(size)]
    if size & (size - 1):  # the odd ones of the first few hand in, and are told
        fold = _Round(1, num_bytes, kind="tree")
        rounds = [fold._replace(combines=True), *rounds, fold]
    return rounds


def _halving(size: int, num_bytes: float) -> list[_Round]:
    back = [each._replace(num_bytes=num_bytes / (2 * each.reach)) for each in _paired(size)]
    rounds = [*(part._replace(combines=True) for part in back), *reversed(back)]
    if size & (size - 1):
        fold = _Round(1, num_bytes / 2)
        given = fold._replace(kind="tree")
        rounds = [fold._replace(combines=True), given, *rounds, given._replace(times=2)]
    return rounds


def _tree(size: int, num_bytes: float) -> list[_Round]:
    reaches = [1 << k for k in range((size - 1).bit_length())]
    down = [_Round(reach, num_bytes, kind="tree") for reach in reaches]
    return [*(part._replace(combines=True) for part in down), *down]


SEGMENT_BYTES = SCHEDULES["double_tree"].segment_bytes


def _double_tree(size: int, num_bytes: float) -> list[_Round]:
    depth = (size - 1).bit_length()
    segment = min(SEGMENT_BYTES, num_bytes / 2)
    children = min(2, size - 1)  # an inner rank takes a segment from each of them
    behind = children * (num_bytes / 2 - segment) / depth  # the other segments
    way = _Round(max(size // 2, 1), segment + behind, 2 * depth, "tree")
    return [way._replace(combines=True), way]


ALGORITHMS: dict[str, Callable[[int, float], list[_Round]]] = {
    "ring": _ring,
    "doubling": _doubling,
    "halving": _halving,
    "tree": _tree,
    "double_tree": _double_tree,
}
"""Those of ``comm/rail`` by name, as rounds: of the number of ranks and the bytes of a message."""

ON_A_NODE = ("slices", "direct")


def _load(rounds: list[_Round], machine: Machine, block: int, lanes: int) -> Load:
    """Add up rounds of ranks that lie in blocks on the nodes, in as many lanes at a time.

    Messages that leave a node share its cards, and those that leave a leaf switch its links.
    """
    total = Load()
    for each in rounds:
        leaving = each.leaving(block) * lanes if machine.nodes > 1 else 0
        num_bytes = each.times * each.num_bytes
        if leaving:
            width = max(math.ceil(leaving / machine.nics), _at_leaf(each, machine, block, leaving))
            total += Load(network_rounds=each.times, network_bytes=num_bytes * width)
        else:
            total += Load(node_rounds=each.times, node_bytes=num_bytes)
        if each.combines:
            total += Load(combined_bytes=num_bytes)
    return total


def _at_leaf(each: _Round, machine: Machine, block: int, leaving: int) -> float:
    """Return how many messages share as much of a leaf's links upwards as one card carries."""
    if not 0 < machine.leaf_size < machine.nodes:
        return 0.0
    of_nodes = each._replace(reach=max(each.reach // block, 1))
    cards = machine.leaf_size * machine.nics / machine.oversubscription
    return of_nodes.leaving(machine.leaf_size) * leaving / cards


def allreduce(machine: Machine, num_bytes: float, way: Way) -> Load:
    """Return the load of a sum over all ranks of a machine; its links do not matter.

    Ranks are numbered node by node. Inside a node every rank sums a slice of the message, or all
    of it if ``direct``, out of memory that all of them read: no message passes there but by flat
    algorithms.

    Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
    operations in MPICH"; Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations"; as in ``comm/rail/algorithms``. What shares a card waits for it.
    """
    local, codec = machine.ranks_per_node, CODECS[way.codec]
    if machine.num_ranks == 1:
        return Load()
    if not way.rails:
        rounds = ALGORITHMS[way.algorithm](machine.num_ranks, codec.ratio * num_bytes)
        coded = Load(combined_bytes=codec.passes * num_bytes)
        return _load(rounds, machine, local, 1) + coded
    total = _on_node(local, num_bytes, direct=way.algorithm == "direct")
    if machine.nodes == 1:
        return total
    rails = min(way.rails, local)
    part = num_bytes / rails
    rounds = ALGORITHMS[way.algorithm](machine.nodes, codec.ratio * part)
    coded = Load(combined_bytes=codec.passes * part)
    return total + _load(rounds, machine, 1, rails) + coded


def _on_node(local: int, num_bytes: float, *, direct: bool) -> Load:
    depth, others = (local - 1).bit_length(), (local - 1) * num_bytes
    if direct:
        return Load(node_rounds=depth, combined_bytes=others)
    return Load(node_rounds=3 * depth, combined_bytes=2 * others / local)  # and copied


def fastest(machine: Machine, num_bytes: float, codec: str = "none") -> Way:
    """Return the way of two levels that takes least time: which algorithm, how many rails."""
    local = machine.ranks_per_node
    if machine.nodes == 1:
        return Way("slices", rails=1)
    rails = sorted({1, min(machine.nics, local), min(2 * machine.nics, local), local})
    ways = [Way(name, many, codec) for name in ALGORITHMS for many in rails]
    return min(ways, key=lambda way: allreduce(machine, num_bytes, way).seconds(machine))


def bound(machine: Machine, num_bytes: float) -> Load:
    """Return what no way to sum goes below: of N nodes each sends 2(N-1)/N of the message.

    And no result is known to all before log2 N messages have followed each other. On one node,
    the same of its ranks.

    Source: Chan et al. 2007, "Collective communication: theory, practice, and experience".
    """
    several = machine.nodes > 1
    size = machine.nodes if several else machine.ranks_per_node
    rounds, sent = math.ceil(math.log2(size)), 2 * (size - 1) / size * num_bytes
    if several:
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
    remote = machine.num_ranks - machine.ranks_per_node
    taken = Load(combined_bytes=machine.num_ranks * share)
    return taken + Load(network_rounds=1, network_bytes=remote * share / machine.nics)
