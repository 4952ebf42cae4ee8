"""Growth of the work of a function with the number of ranks, in operations instead of seconds."""

import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

MAX_SLOPE = 1.1  # limit of ``slope`` for functions that may grow linearly


def num_operations(function: Callable[[], object]) -> int:
    """Return the number of bytecode instructions that a call of ``function`` executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def slope(counts: Sequence[tuple[int, int]]) -> float:
    """Return the exponent of the growth, given the smallest and the largest (size, count)."""
    (small, few), (large, many) = min(counts), max(counts)
    return math.log(many / few) / math.log(large / small)


def slope_of(work: Callable[[int], Callable[[], object]], sizes: Sequence[int]) -> float:
    """Return the exponent of the growth of the operations of function ``work(size)`` with size."""
    return slope([(size, num_operations(work(size))) for size in sizes])
