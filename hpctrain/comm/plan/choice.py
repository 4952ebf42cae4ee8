"""The choice of algorithms and sizes, by rule and from measurements: pure arithmetic."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from hpctrain.cluster.topology import Topology
from hpctrain.comm.plan.plan import Measurement, Plan, SizeTable, expected_s
from hpctrain.comm.rail.algorithms import DOUBLING_BYTES
from hpctrain.core.config import Settings
from hpctrain.core.units import KIB, MIB

STEP_BYTES = 64 * KIB  # a step of a ring that carries less costs mostly its latency
DIRECT_RANKS = 4
"""Up to so many ranks of a node each sums all that they hold: one more meeting costs as much."""
DIRECT_BYTES = 64 * KIB
"""Where more ranks do so, up to so many bytes besides the own ones and one other's."""
TURNS_BYTES = 256 * KIB
"""Ranks that take turns on cores wait for all that the others do: from so many bytes on, a
tensor is summed by slices, with less of it."""
SIZES: dict[str, tuple[int, ...]] = {
    "tensors": (4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB),
    "rail": (4 * KIB, 64 * KIB, MIB),
}
"""Sizes in bytes that are measured."""

GAIN = 0.15
"""The rule stays unless another algorithm takes so much less time: smaller gains are noise."""

SMALL_BYTES = 16 * KIB
"""Between nodes smaller tensors take the levels, and parts of them the rule's way: the library,
which ranks must meet asleep before, is not faster, and named ones travel with votes of nodes, to
the same bits."""
ON_A_NODE: tuple[str, ...] = ("direct", "slices", "library")
BETWEEN_NODES: tuple[str, ...] = ("levels", "library")
BY_HOROVOD: tuple[str, ...] = ("flat", "two-level")
_LARGE_PARTS: tuple[str, ...] = ("halving", "ring", "double_tree", "library")
_NO_RAIL = SizeTable(((0, "library"),))


def choose_plan(
    topology: Topology, settings: Settings, *, node_memory: str, threads: Sequence[int]
) -> Plan:
    """Choose the plan by rule, from facts that are the same on every rank.

    ``node_memory`` is a way that every node has, ``threads`` are torch's of each rank.
    """
    overlap = settings.overlap
    if overlap == "auto":
        # A thread that sums competes with backward for cores; without a free one it only delays.
        # Where backward runs on an accelerator, the thread of the program has little to do.
        num_busy = (max(threads) + 1) * len(topology.core_peers)
        free_core = topology.devices > 0 or topology.num_peer_cores >= num_busy
        overlap = "thread" if free_core else "end"
    one_level = topology.num_nodes == 1 or node_memory == "none"
    tensors = _tensors_of(topology, node_memory, in_turns=bool(topology.shared_cores))
    if settings.engine == "horovod" and node_memory != "alone":
        tensors = SizeTable(((0, BY_HOROVOD[has_equal_nodes(topology)]),))
    return Plan(
        node_memory=node_memory,
        num_rails=0 if one_level else min(topology.max_rails, 2 * topology.cards),
        bucket_bytes=settings.bucket_bytes,
        overlap=overlap,
        threads=min(threads),
        tensors=tensors,
        rail=_NO_RAIL if one_level else rail_rule(topology.num_nodes),
        engine=settings.engine,
    )


def has_equal_nodes(topology: Topology) -> bool:
    """Say whether there are several nodes, with several ranks each and as many on all. Pure."""
    sizes = {len(ranks) for ranks in topology.nodes}
    return topology.num_nodes > 1 and len(sizes) == 1 and sizes != {1}


def tensors_rule(
    num_nodes: int, node_memory: str, local_size: int, *, in_turns: bool = False
) -> SizeTable:
    """Choose how ordinary tensors travel, for so many ranks on the largest node, unmeasured.

    With ``in_turns`` ranks outnumber cores.
    """
    if node_memory in ("none", "alone"):
        return SizeTable(((0, "library"),))
    if num_nodes > 1:
        return SizeTable(((0, "levels"),))
    if local_size <= DIRECT_RANKS:
        return SizeTable(((0, "direct"), *([(TURNS_BYTES, "slices")] if in_turns else [])))
    return SizeTable(((0, "direct"), (max(DIRECT_BYTES // (local_size - 2), 1), "slices")))


def rail_rule(num_nodes: int) -> SizeTable:
    """Choose how a rail over so many nodes carries its part, without a measurement.

    A round costs ``a`` seconds of latency and ``b`` seconds per byte. For m bytes over N nodes
    doubling takes log2(N) (a + m b), halving 2 log2(N) a + 2(N-1)/N m b and the ring
    2(N-1) a + 2(N-1)/N m b, but the ring combines one segment while the next is on its way and
    asks each link for one stream. So: doubling while latency is all that counts, then halving,
    and the ring once each of its steps carries 64 KiB. Where N is no power of two halving pays
    for it with up to 3/2 m b, so with less than 8 nodes the ring follows doubling at once.
    """
    if num_nodes == 1:
        return _NO_RAIL
    middle = "halving" if num_nodes >= 8 or num_nodes & (num_nodes - 1) == 0 else "ring"
    ring_from = num_nodes * STEP_BYTES
    if num_nodes <= 2:  # doubling sends two ranks no more than halving does, in half the rounds
        return SizeTable(((0, "doubling"), (ring_from, "ring")))
    if middle == "ring":
        return SizeTable(((0, "doubling"), (DOUBLING_BYTES, "ring")))
    return SizeTable(((0, "doubling"), (DOUBLING_BYTES, "halving"), (ring_from, "ring")))


def _tensors_of(topology: Topology, node_memory: str, *, in_turns: bool = False) -> SizeTable:
    local_size = max(map(len, topology.nodes))
    return tensors_rule(topology.num_nodes, node_memory, local_size, in_turns=in_turns)


def plan_for_group(plan: Plan, topology: Topology) -> Plan:
    """Return the plan of some of the ranks, whose topology is given; pure.

    A table stays where the group spans one node as all ranks do, or several as they do.
    """
    several = topology.num_nodes > 1
    num_rails = 0
    if several and plan.node_memory != "none":
        num_rails = min(plan.num_rails or 1, topology.max_rails)
    if several == (plan.num_rails > 0) or plan.node_memory == "none":
        return replace(plan, num_rails=num_rails, measured=())
    return replace(
        plan,
        num_rails=num_rails,
        # Not in turns: whether cores are shared is known of the own rank, and all need one answer.
        tensors=_tensors_of(topology, plan.node_memory),
        rail=rail_rule(topology.num_nodes),
        measured=(),
    )


def candidates(what: str, num_bytes: int, plan: Plan) -> tuple[str, ...]:
    """Return the algorithms worth measuring at a size: the plan's first, then in a fixed order."""
    if plan.engine == "horovod":
        sensible = BY_HOROVOD
    elif what == "tensors" and plan.num_rails:
        sensible = BETWEEN_NODES
        if num_bytes < SMALL_BYTES:
            sensible = BETWEEN_NODES[:1]
    elif what == "tensors":
        sensible = ON_A_NODE
    elif num_bytes < SMALL_BYTES:
        sensible = ()
    else:
        sensible = _LARGE_PARTS
    return tuple(dict.fromkeys((plan.table(what).at(num_bytes), *sensible)))


def refine(rule: SizeTable, measured: Sequence[Measurement], sizes: Sequence[int]) -> SizeTable:
    """Return the rule's table with what was measured to be clearly faster.

    A measured size speaks for all that are nearer to it than to another of ``sizes``, by factor;
    the last one for all above. Where the rule's algorithm was not measured, the rule stays.
    """
    edges = [0, *(math.isqrt(a * b) for a, b in pairwise(sizes))]
    steps: list[tuple[int, str]] = []
    for start in sorted({*edges, *(start for start, _ in rule.steps)}):
        size = sizes[bisect_right(edges, start) - 1]
        here = {m.algorithm: m for m in measured if m.num_bytes == size}
        name = faster(here, rule.at(start))
        if not steps or steps[-1][1] != name:
            steps.append((start, name))
    return SizeTable(tuple(steps))


def faster(measured: Mapping[str, Measurement], default: str, least_gain: float = GAIN) -> str:
    """Return the fastest of the algorithms that gain enough over ``default``; else ``default``.

    One that gains does so in its median, and in each of several runs over each of the default's:
    what the machine does besides must not choose a plan. Of equals the first is taken; ``default``
    stays where it was not measured.
    """
    if default not in measured:
        return default
    rule = measured[default]
    gain = [
        m
        for m in measured.values()
        if m.seconds <= (1 - least_gain) * rule.seconds
        and len(m.runs) > 1
        and max(m.runs) < min(rule.runs)
    ]
    return min(gain, key=lambda m: m.seconds).algorithm if gain else default


BATCHING_SIZES = (KIB, 256 * KIB)
"""Sizes in bytes to measure: one that is all latency, and one that no link hides in a buffer and
a slow one carries in ten milliseconds."""
LATENCY_SHARE = 1 / 128  # of the time of a full message
_FUSION_BYTES = (64 * KIB, 64 * MIB)
_LATENCY_S = (2e-6, 8e-3)


class Batching(NamedTuple):
    """How named operations are put together."""

    fusion_bytes: int  # largest message of several operations
    cycle_s: float  # how long an operation waits for others, unless somebody waits for it


DEFAULT = Batching(64 * MIB, 0.0)  # without a measurement: no limit that matters, and no waiting


def batching(seconds: Mapping[int, float]) -> Batching:
    """Choose from how long all-reduces over all ranks take, by size in bytes; pure.

    A message of n bytes takes ``a + b n`` seconds. What is fused saves ``a`` for each operation
    but the first; what waits longer than ``a`` loses more than it can save. So operations are
    fused up to a size at which the latency is a small share of the time, and wait for about half a
    latency: they wait as long again, on average, for the message before theirs.

    Both figures are powers of four, in bytes and in microseconds: what is nearer to one of them
    than to the next is the same link, measured at another moment. ``DEFAULT`` where fewer than two
    sizes were measured, or the largest took no longer.
    """
    if len(seconds) < 2:
        return DEFAULT
    smallest, largest = min(seconds), max(seconds)
    per_byte_s = (seconds[largest] - seconds[smallest]) / (largest - smallest)
    if per_byte_s <= 0:
        return DEFAULT
    latency_s = _between(seconds[smallest], *_LATENCY_S)
    fusion_bytes = _between(latency_s / (LATENCY_SHARE * per_byte_s), *_FUSION_BYTES)
    return Batching(_power_of_four(fusion_bytes), _power_of_four(latency_s / 2 / 1e-6) * 1e-6)


CHUNKS = (512 * KIB, 64 * KIB)
"""Bytes of a rail's part, where several chunks are on the way at once: smaller ones keep the link
busier, and cost more of the processor, which may be the limit then."""
CHUNKED_BYTES = MIB
"""A tensor by which they are compared, cut by the second size and not by the first."""
CHUNKED_S = 0.1
"""A link that takes longer for it is so slow that the smaller ones are taken unmeasured."""
_CHUNK_GAIN = 0.05
CHUNKS_FROM_S = 2e-9
"""Seconds per byte of an all-reduce from which on the link is the limit, and not the processor."""


def chunk_sizes(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Return the chunks of rails worth measuring, by how long all-reduces take; pure.

    None where the link is not the limit or fewer than two sizes were measured.
    """
    if len(seconds) < 2:
        return ()
    smallest, largest = min(seconds), max(seconds)
    per_byte_s = (seconds[largest] - seconds[smallest]) / (largest - smallest)
    if per_byte_s < CHUNKS_FROM_S:
        return ()
    return CHUNKS if expected_s(seconds, CHUNKED_BYTES) <= CHUNKED_S else CHUNKS[-1:]


def best_chunk(runs: Mapping[int, Sequence[float]]) -> int:
    """Choose from the seconds of some runs with each size of chunks, the default first; pure."""
    measured = {
        str(size): Measurement("chunks", CHUNKED_BYTES, str(size), tuple(seconds))
        for size, seconds in runs.items()
    }
    return int(faster(measured, next(iter(measured)), _CHUNK_GAIN))


def _between(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _power_of_four(value: float) -> int:
    """Return the one that is nearest by factor."""
    return 1 << 2 * round(math.log2(value) / 2)
