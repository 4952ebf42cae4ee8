"""From measurements to a table of algorithms by size: pure arithmetic, the same on every rank."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from hpctrain.comm.measurement import Measurement
from hpctrain.comm.plan.plan import Plan
from hpctrain.comm.plan.size_table import SizeTable
from hpctrain.core.units import KIB, MIB

SIZES: dict[str, tuple[int, ...]] = {
    "tensors": (4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB),
    "rail": (4 * KIB, 64 * KIB, MIB),
}
"""Sizes in bytes that are measured."""

GAIN = 0.15
"""The rule stays unless another algorithm takes so much less time: smaller gains are noise."""

ON_A_NODE: tuple[str, ...] = ("direct", "slices", "library")
BETWEEN_NODES: tuple[str, ...] = ("levels", "library")
BY_HOROVOD: tuple[str, ...] = ("flat", "two-level")
_SMALL_PARTS: tuple[str, ...] = ("doubling", "halving", "tree", "library")
_LARGE_PARTS: tuple[str, ...] = ("halving", "ring", "double_tree", "library")


def candidates(what: str, num_bytes: int, plan: Plan) -> tuple[str, ...]:
    """Return the algorithms worth measuring at a size: the plan's first, then in a fixed order."""
    if plan.engine == "horovod":
        sensible = BY_HOROVOD
    elif what == "tensors":
        sensible = BETWEEN_NODES if plan.num_rails else ON_A_NODE
    else:
        sensible = _SMALL_PARTS if num_bytes < 64 * KIB else _LARGE_PARTS
    return tuple(dict.fromkeys((plan.table(what).at(num_bytes), *sensible)))


def refine(rule: SizeTable, measured: Sequence[Measurement], sizes: Sequence[int]) -> SizeTable:
    """Return the rule's table with what was measured to be clearly faster.

    A measured size speaks for all that are nearer to it than to another of ``sizes``, by factor;
    the last one for all above. Where the rule's algorithm was not measured, the rule stays.

    Args:
        rule: the table without measurements.
        measured: of one kind, at ``sizes``; some may be missing.
        sizes: that were to be measured, in bytes, growing.
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


def faster(measured: Mapping[str, Measurement], default: str) -> str:
    """Return the fastest of the algorithms that gain enough over ``default``; else ``default``.

    One that gains does so in its median, and in each of several runs over each of the default's:
    what the machine does besides must not choose a plan.

    Args:
        measured: for one size, by algorithm; of equals the first is taken.
        default: stays where it was not measured.
    """
    if default not in measured:
        return default
    rule = measured[default]
    gain = [
        m
        for m in measured.values()
        if m.seconds <= (1 - GAIN) * rule.seconds
        and len(m.runs) > 1
        and max(m.runs) < min(rule.runs)
    ]
    return min(gain, key=lambda m: m.seconds).algorithm if gain else default


def expected_s(times: Mapping[int, float], num_bytes: int) -> float:
    """Estimate the seconds for a size from those for smaller ones, along a line.

    Args:
        times: seconds by size in bytes, all below ``num_bytes``.
        num_bytes: the size to estimate.

    Returns:
        0 where nothing is known.
    """
    sizes = sorted(times)
    if not sizes:
        return 0.0
    last = times[sizes[-1]]
    if len(sizes) == 1:
        return last
    slope = (last - times[sizes[-2]]) / (sizes[-1] - sizes[-2])
    return last + max(slope, 0.0) * (num_bytes - sizes[-1])
