"""An array in parts: the system has the memory of each again once nobody uses it any more."""

import mmap
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.io.largepages import first_large_page, large_pages
from hpctrain.data.io.mapped import PAGE_BYTES, View


class PartedArray:
    """To be filled as one array, and then handed out in parts."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Reserve memory, in large pages where the system has them; it is taken when filled."""
        num_bytes = prod(shape) * dtype.itemsize
        self._memory = large_pages(num_bytes)
        every = np.frombuffer(self._memory, np.uint8)
        self._begin = first_large_page(every)
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
        owner = _Part(self._memory, begin, begin + some.nbytes)
        return np.asarray(
            View(owner, some.ctypes.data, some.shape, some.dtype.str, is_readonly=False)
        )


class _Part:
    """The bytes ``[begin, end)`` of some memory, while somebody uses them."""

    def __init__(self, memory: mmap.mmap, begin: int, end: int) -> None:
        self._memory, self._begin, self._end = memory, begin, end

    def __del__(self) -> None:
        """Give back the pages that hold nothing of other parts."""
        begin = -(-self._begin // PAGE_BYTES) * PAGE_BYTES
        if (num_bytes := self._end // PAGE_BYTES * PAGE_BYTES - begin) > 0:
            self._memory.madvise(mmap.MADV_DONTNEED, begin, num_bytes)
