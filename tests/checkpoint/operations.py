"""Provide the number of operations of a call, and its slope over the size of the input."""

import math
import sys


def num_operations(function, *args):
    """Return the number of bytecodes that a call executes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count


def slope(function, of_size, size):
    """Return the slope of the operations over the size, on logarithmic axes."""
    counts = [num_operations(function, *of_size(number)) for number in (size, 2 * size)]
    return math.log2(counts[1] / counts[0])
