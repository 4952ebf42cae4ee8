"""Batch memory that is used again: the page faults of fresh memory cost more than its copy."""

import sys
from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.units import KIB
from hpctrain.data.io.largepages import HUGE_BYTES, first_large_page, large_pages

_SMALL_BYTES = 64 * KIB
_LARGE_BYTES = 3 * HUGE_BYTES
"""Memory in large pages, with one page to spare."""
_MAX_PER_SIZE = 16
_MAX_SIZES = 8

# The list and the argument of getrefcount: nothing else knows the buffer.
_REFERENCES_OF_FREE = 2


class Buffers:
    """Hands out uninitialised arrays, and the memory of one again once nothing refers to it.

    A view, a tensor of ``torch.from_numpy`` and whatever shares memory with one keep a buffer
    from being handed out. Several threads may call it at once.
    """

    def __init__(self) -> None:
        """Start without memory."""
        self._by_size: OrderedDict[int, list[NDArray[np.uint8]]] = OrderedDict()
        self._lock = Lock()

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array to be filled; small ones are always new."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < _SMALL_BYTES:
            return np.empty(shape, dtype)
        # Sizes are rounded up by an eighth at most, so that ragged batches share buffers.
        step = 1 << (num_bytes.bit_length() - 4)
        memory = self._memory(-(-num_bytes // step) * step)
        start = first_large_page(memory) if len(memory) >= _LARGE_BYTES else 0
        # A direct view: only of those does the array that owns the memory keep count.
        return memory[start : start + num_bytes].view(dtype).reshape(shape)

    def _memory(self, size: int) -> NDArray[np.uint8]:
        buffers = self._by_size.get(size)
        if buffers is None:
            if len(self._by_size) >= _MAX_SIZES:
                self._forget_oldest()
            buffers = self._by_size.setdefault(size, [])
        with self._lock:
            # The one that became free last is the likeliest to lie in a cache.
            for place in range(len(buffers) - 1, -1, -1):
                if sys.getrefcount(buffers[place]) == _REFERENCES_OF_FREE:
                    buffer = buffers.pop(place)
                    buffers.append(buffer)
                    return buffer
            buffer = _new(size)
            if len(buffers) < _MAX_PER_SIZE:
                buffers.append(buffer)
            return buffer

    def _forget_oldest(self) -> None:
        try:
            self._by_size.popitem(last=False)
        except KeyError:
            return


def _new(num_bytes: int) -> NDArray[np.uint8]:
    """Return uninitialised memory, of large pages where the system has them.

    A batch of 10 MB stays in a cache from one step to the next, unless it lies scattered over
    small pages, of which some take the same place in that cache: copies into it then took 1.6
    times as long.
    """
    if num_bytes < _LARGE_BYTES - HUGE_BYTES:
        return np.empty(num_bytes, np.uint8)
    return np.frombuffer(large_pages(num_bytes), np.uint8)
