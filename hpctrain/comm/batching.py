"""Batching of small operations: how many travel as one, and how long they wait.

A message of n bytes takes ``a + b n`` seconds. What is fused saves ``a`` for each operation but
the first; what waits longer than ``a`` loses more than it can save. So operations are fused up to
a size at which the latency is a small share of the time, and wait for about half a latency: they
wait as long again, on average, for the message before theirs.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from hpctrain.core.units import KIB, MIB

SIZES = (KIB, 256 * KIB)
"""Sizes in bytes to measure: one that is all latency, and one that no link hides in a buffer and
a slow one carries in ten milliseconds."""
LATENCY_SHARE = 1 / 128
"""Of the time of a full message."""
_FUSION_BYTES = (64 * KIB, 64 * MIB)
_LATENCY_S = (2e-6, 8e-3)


class Batching(NamedTuple):
    """How named operations are put together."""

    fusion_bytes: int
    """Largest message of several operations."""
    cycle_s: float
    """How long an operation waits for others, unless somebody waits for it."""


DEFAULT = Batching(64 * MIB, 0.0)
"""Without a measurement: no limit that matters, and no waiting."""


def batching(seconds: Mapping[int, float]) -> Batching:
    """Choose from how long all-reduces over all ranks take; pure.

    Both figures are powers of four, in bytes and in microseconds: what is nearer to one of them
    than to the next is the same link, measured at another moment.

    Args:
        seconds: by size in bytes, each the shortest of several runs.

    Returns:
        ``DEFAULT`` where fewer than two sizes were measured, or the largest took no longer.
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


def _between(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _power_of_four(value: float) -> int:
    """Return the one that is nearest by factor."""
    return 1 << 2 * round(math.log2(value) / 2)
