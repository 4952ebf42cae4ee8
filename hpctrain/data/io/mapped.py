"""Files as arrays at addresses of one's own choice, and whether they lie in memory."""

import mmap
import os
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.libc import advise_memory, map_memory, unmap_memory
from hpctrain.core.units import MIB

HUGE_BYTES = 2 * MIB
"""Of a large page, used where an address and its place in the file agree so far."""
_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22
_NUM_PROBES = 32


class Space:
    """Addresses into which files are mapped, for reading; free with the last array of them.

    Whoever reads where nothing is mapped, or behind the end of a file that became shorter, ends
    the process (SIGBUS): look at the size of the file before.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, offset: int = 0) -> None:
        """Reserve addresses for such an array, not of 0 bytes; no memory.

        ``offset`` is the byte of a file that will be at its start, for large pages.

        Raises:
            OSError: there are not so many, for instance by ``ulimit -v``.
        """
        self._num_bytes = prod(shape) * np.dtype(dtype).itemsize
        self._num_reserved = self._num_bytes + HUGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._reserved = map_memory(self._num_reserved, 0, flags)
        page = offset - offset % mmap.PAGESIZE
        self._start = self._reserved + (page - self._reserved) % HUGE_BYTES
        self.__array_interface__ = {
            "version": 3,
            "data": (self._start, True),
            "shape": shape,
            "typestr": dtype,
        }

    def map_file(self, place: int, descriptor: int, offset: int, num_bytes: int) -> None:
        """Show bytes of a file from ``place`` on, a multiple of the page size as ``offset`` is.

        Raises:
            OSError: the file system cannot map it, or bytes begin on no page.
        """
        assert place + num_bytes <= self._num_bytes
        map_memory(
            num_bytes,
            mmap.PROT_READ,
            mmap.MAP_SHARED | _MAP_FIXED,
            descriptor=descriptor,
            offset=offset,
            address=self._start + place,
        )
        # Only advice: not every kernel and file system can follow it.
        advise_memory(self._start + place, num_bytes, mmap.MADV_HUGEPAGE)

    def bring(self, place: int, num_bytes: int) -> bool:
        """Read what is mapped there and wait for it; return whether it is in memory now.

        It is not where the disk fails, where the file has become shorter and before Linux 5.14.
        Nothing is copied, and the system reads in large pages where it has them: that takes a
        fifth of the CPU time of ``pread``.
        """
        return not advise_memory(self._start + place, num_bytes, _MADV_POPULATE_READ)

    def array(self) -> NDArray[Any]:
        """Return what is mapped; whatever shares its memory keeps it."""
        return np.asarray(self)

    def __del__(self) -> None:
        """Give the addresses back."""
        if hasattr(self, "_reserved"):
            unmap_memory(self._reserved, self._num_reserved)


def is_cached(descriptor: int, num_bytes: int) -> bool:
    """Return whether a file lies in the page cache, as far as probes tell.

    Differs from mincore(2), which tells the owner of a file only and calls every page of
    another's file resident: one byte here and there is read without waiting (``RWF_NOWAIT``).
    """
    byte = bytearray(1)
    try:
        return all(
            os.preadv(descriptor, [byte], num_bytes * probe // _NUM_PROBES, os.RWF_NOWAIT)
            for probe in range(_NUM_PROBES)
        )
    except OSError:
        # Not in the cache, or a file system that does not tell.
        return False
