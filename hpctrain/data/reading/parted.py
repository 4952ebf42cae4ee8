"""An array in parts: the system has the memory of each again once nobody uses it any more."""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.reading.mapped import HUGE_BYTES, PAGE_BYTES


class PartedArray:
    """To be filled as one array, and then handed out in parts."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Reserve memory, in large pages where the system has them; it is taken when filled."""
        num_bytes = prod(shape) * dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        # There is room to begin at a large page.
        self._memory = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags)
        with suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        every = np.frombuffer(self._memory, np.uint8)
        self._begin = -every.ctypes.data % HUGE_BYTES
        self.values: NDArray[Any] = (
            every[self._begin : self._begin + num_bytes].view(dtype).reshape(shape)
        )
        """All of it."""

    def part(self, start: int, stop: int) -> NDArray[Any]:
        """Return ``values[start:stop]``, which may be done once.

        What ``values`` shows there is lost with the last view of the part.
        """
        some = self.values[start:stop]
        if not some.nbytes:
            return some
        begin = self._begin + start * some.strides[0]
        data = np.asarray(_Part(self._memory, begin, begin + some.nbytes))
        return data.view(some.dtype).reshape(some.shape)


class _Part:
    """What numpy asks for memory; an array made of it keeps it alive."""

    def __init__(self, memory: mmap.mmap, begin: int, end: int) -> None:
        """Take the bytes ``[begin, end)`` of some memory."""
        self._memory, self._begin, self._end = memory, begin, end
        first = np.frombuffer(memory, np.uint8, count=1, offset=begin)
        self.__array_interface__ = {
            "version": 3,
            "data": (first.ctypes.data, False),
            "shape": (end - begin,),
            "typestr": "|u1",
        }

    def __del__(self) -> None:
        """Give back the pages that hold nothing of other parts."""
        begin = -(-self._begin // PAGE_BYTES) * PAGE_BYTES
        if (num_bytes := self._end // PAGE_BYTES * PAGE_BYTES - begin) > 0:
            self._memory.madvise(mmap.MADV_DONTNEED, begin, num_bytes)
