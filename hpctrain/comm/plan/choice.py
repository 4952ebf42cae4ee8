"""Choice of algorithms and sizes, by rule or from measurements, without communication."""

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

STEP_BYTES = 64 * KIB  # smaller steps of a ring are dominated by latency
DIRECT_RANKS = 4
"""Up to this number of ranks per node, each rank sums whole tensors, which saves a barrier."""
DIRECT_BYTES = 64 * KIB
"""With n > ``DIRECT_RANKS`` ranks per node, each rank sums whole tensors of fewer than
``DIRECT_BYTES / (n - 2)`` bytes."""
OVERSUBSCRIBED_BYTES = 256 * KIB
"""If ranks share cores, tensors of this size or more are summed by slices, since a rank waits for
the work of other ranks and slices are less work in total."""
SIZES: dict[str, tuple[int, ...]] = {
    "tensors": (4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB),
    "rail": (4 * KIB, 64 * KIB, MIB),
}
"""Sizes in bytes that are measured, per table of the plan."""

GAIN = 0.15
"""Relative gain from which an algorithm replaces that of the rule; smaller gains are noise."""

SMALL_BYTES = 16 * KIB
"""Below this size tensors between nodes use ``levels``, and rails the algorithm of the rule. MPI
collectives are not faster, because ranks synchronize by a sleeping wait before them. Named tensors
of this size are sent with the votes of the nodes and need bitwise identical results."""
ON_A_NODE: tuple[str, ...] = ("direct", "slices", "library")
BETWEEN_NODES: tuple[str, ...] = ("levels", "library")
BY_HOROVOD: tuple[str, ...] = ("flat", "two-level")
_LARGE_PARTS: tuple[str, ...] = ("halving", "ring", "double_tree", "library")
_NO_RAIL = SizeTable(((0, "library"),))


def choose_plan(
    topology: Topology, settings: Settings, *, node_memory: str, threads: Sequence[int]
) -> Plan:
    """Choose the plan by rule, from facts that are the same on every rank. Not collective.

    Args:
        topology: nodes and cores of the ranks.
        settings: settings of rank 0.
        node_memory: method of sharing memory that works on every node.
        threads: number of torch threads of each rank.
    """
    overlap = settings.overlap
    if overlap == "auto":
        # A thread that sums competes with backward for cores and needs a free core to be useful.
        # If backward runs on an accelerator, the cores are idle. One rank alone has no sums.
        num_busy = (max(threads) + 1) * len(topology.core_peers)
        free_core = topology.devices > 0 or topology.num_peer_cores >= num_busy
        overlap = "thread" if free_core and topology.size > 1 else "end"
    one_level = topology.num_nodes == 1 or node_memory == "none"
    tensors = _tensors_of(topology, node_memory, oversubscribed=bool(topology.shared_cores))
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
    """Return True if there are several nodes, with equal numbers of ranks, at least two each."""
    sizes = {len(ranks) for ranks in topology.nodes}
    return topology.num_nodes > 1 and len(sizes) == 1 and sizes != {1}


def tensors_rule(
    num_nodes: int, node_memory: str, local_size: int, *, oversubscribed: bool = False
) -> SizeTable:
    """Choose the algorithms for tensors that are not buckets, by rule.

    Args:
        num_nodes: number of nodes.
        node_memory: method of sharing memory.
        local_size: number of ranks on the largest node.
        oversubscribed: whether ranks outnumber cores.
    """
    if node_memory in ("none", "alone"):
        return SizeTable(((0, "library"),))
    if num_nodes > 1:
        return SizeTable(((0, "levels"),))
    if local_size <= DIRECT_RANKS:
        return SizeTable(
            ((0, "direct"), *([(OVERSUBSCRIBED_BYTES, "slices")] if oversubscribed else []))
        )
    return SizeTable(((0, "direct"), (max(DIRECT_BYTES // (local_size - 2), 1), "slices")))


def rail_rule(num_nodes: int) -> SizeTable:
    """Choose the algorithms for a rail over ``num_nodes`` nodes, by rule.

    A round costs ``a`` seconds of latency and ``b`` seconds per byte. For m bytes over N nodes
    doubling takes log2(N) (a + m b), halving 2 log2(N) a + 2(N-1)/N m b and the ring
    2(N-1) a + 2(N-1)/N m b, but the ring combines a segment while the next one is in flight, and
    uses one stream per link. So the rule selects doubling while latency dominates, then halving,
    and the ring once each of its steps sends 64 KiB. If N is not a power of two, halving costs up
    to 3/2 m b more, so with fewer than 8 nodes the rule skips halving.
    """
    if num_nodes == 1:
        return _NO_RAIL
    middle = "halving" if num_nodes >= 8 or num_nodes & (num_nodes - 1) == 0 else "ring"
    ring_from = num_nodes * STEP_BYTES
    if num_nodes <= 2:  # with two ranks doubling sends as much as halving, in half the rounds
        return SizeTable(((0, "doubling"), (ring_from, "ring")))
    if middle == "ring":
        return SizeTable(((0, "doubling"), (DOUBLING_BYTES, "ring")))
    return SizeTable(((0, "doubling"), (DOUBLING_BYTES, "halving"), (ring_from, "ring")))


def _tensors_of(
    topology: Topology, node_memory: str, *, oversubscribed: bool = False
) -> SizeTable:
    local_size = max(map(len, topology.nodes))
    return tensors_rule(topology.num_nodes, node_memory, local_size, oversubscribed=oversubscribed)


def plan_for_group(plan: Plan, topology: Topology) -> Plan:
    """Return the plan of a group with this ``topology``. Not collective.

    The result has the tables of ``plan`` if group and world are both on one node, if both are on
    several nodes, or if node memory is not used.
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
        # Not ``oversubscribed``: a rank knows only its own cores, and all need the same table.
        tensors=_tensors_of(topology, plan.node_memory),
        rail=rail_rule(topology.num_nodes),
        measured=(),
    )


def candidates(what: str, num_bytes: int, plan: Plan) -> tuple[str, ...]:
    """Return the algorithms to measure for ``num_bytes``, the plan's algorithm first."""
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
    """Return ``rule``, with an algorithm replaced if another algorithm was clearly faster.

    A measurement applies to all sizes for which its size is the nearest measured size by ratio.
    The last measurement applies to all larger sizes. A size at which the algorithm of ``rule`` was
    not measured keeps this algorithm.
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


def faster(measured: Mapping[str, Measurement], default: str, min_gain: float = GAIN) -> str:
    """Return the fastest algorithm that is clearly faster than ``default``, else ``default``.

    The median must be at least ``min_gain`` shorter, and each of several runs shorter than each
    run of ``default``, so that other load on the machine does not determine the plan. The function
    returns the first of equally fast algorithms, and ``default`` if ``default`` was not measured.
    """
    if default not in measured:
        return default
    rule = measured[default]
    gain = [
        m
        for m in measured.values()
        if m.seconds <= (1 - min_gain) * rule.seconds
        and len(m.runs) > 1
        and max(m.runs) < min(rule.runs)
    ]
    return min(gain, key=lambda m: m.seconds).algorithm if gain else default


BATCHING_SIZES = (KIB, 256 * KIB)
"""Sizes in bytes to measure: a size dominated by latency, and a size that exceeds the buffers of
links and takes about 10 ms on a slow link."""
LATENCY_SHARE = 1 / 128  # latency as a fraction of the time of the largest fused message
_FUSION_BYTES = (64 * KIB, 64 * MIB)
_LATENCY_S = (2e-6, 8e-3)


class Batching(NamedTuple):
    """Parameters by which named operations are fused."""

    fusion_bytes: int  # largest message of several operations
    cycle_s: float  # time that an operation waits to be fused, unless a caller waits for it


DEFAULT = Batching(64 * MIB, 0.0)  # without a measurement


def batching(seconds: Mapping[int, float]) -> Batching:
    """Choose fusion parameters from measured times of all-reduces. Not collective.

    A message of n bytes takes ``a + b n`` seconds. Fusion saves ``a`` for each operation but the
    first, and an operation that waits longer than ``a`` loses more than it saves. So operations
    are fused up to the size at which latency is a small fraction of the time, and wait for half of
    ``a``: the previous message delays them, on average, by the other half.

    Both results are rounded to powers of four, in bytes and microseconds, so that repeated
    measurements of a link give the same result.

    Args:
        seconds: duration of an all-reduce by size in bytes.

    Returns:
        The parameters; ``DEFAULT`` if fewer than two sizes were measured, or the largest took no
        longer than the smallest.
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
"""Chunk sizes in bytes of a rail with several chunks in flight. Smaller chunks use the link
better but need more processor time, which may become the limit."""
CHUNKED_BYTES = MIB
"""Bytes of the tensor for comparing ``CHUNKS``: only the second size divides it into chunks."""
CHUNKED_S = 0.1
"""If the sum of the tensor takes longer, the smaller size is used without a measurement."""
_CHUNK_GAIN = 0.05
CHUNKS_FROM_S = 2e-9
"""Seconds per byte of an all-reduce above which the link is the limit, not the processor."""


def chunk_sizes(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Return the chunk sizes to measure; ``seconds`` are durations of all-reduces by size.

    The result is empty if the link is not the limit, or fewer than two sizes were measured.
    """
    if len(seconds) < 2:
        return ()
    smallest, largest = min(seconds), max(seconds)
    per_byte_s = (seconds[largest] - seconds[smallest]) / (largest - smallest)
    if per_byte_s < CHUNKS_FROM_S:
        return ()
    return CHUNKS if expected_s(seconds, CHUNKED_BYTES) <= CHUNKED_S else CHUNKS[-1:]


def best_chunk(runs: Mapping[int, Sequence[float]]) -> int:
    """Return the fastest chunk size; ``runs`` has the seconds of each run by chunk size.

    The first size is the default, which is returned unless another size is clearly faster.
    """
    measured = {
        str(size): Measurement("chunks", CHUNKED_BYTES, str(size), tuple(seconds))
        for size, seconds in runs.items()
    }
    return int(faster(measured, next(iter(measured)), _CHUNK_GAIN))


def _between(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _power_of_four(value: float) -> int:
    """Return the power of four nearest to ``value`` by ratio."""
    return 1 << 2 * round(math.log2(value) / 2)
