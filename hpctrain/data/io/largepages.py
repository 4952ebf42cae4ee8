"""Fresh memory in large pages: over small ones it is slower to take and to fill."""

import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

HUGE_BYTES = 1 << 21
"""Of a large page, which the system uses where address and place in the file agree so far."""


def large_pages(num_bytes: int) -> mmap.mmap:
    """Reserve memory of large pages, where the system has them, with room to begin at one.

    Memory is taken where it is touched.
    """
    memory = mmap.mmap(-1, num_bytes + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def first_large_page(memory: NDArray[np.uint8]) -> int:
    """Return where in some memory the first large page begins."""
    return -memory.ctypes.data % HUGE_BYTES
