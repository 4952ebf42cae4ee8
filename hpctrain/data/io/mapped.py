"""Plain bytes of files: mapped at chosen addresses, and checked by blocks."""

import mmap
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.checksum import crc32
from hpctrain.core.libc import advise_memory, map_memory, unmap_memory
from hpctrain.core.units import MIB
from hpctrain.data.io.values import Array, read_into

HUGE_BYTES = 2 * MIB
"""Of a large page, used where an address and its place in the file agree so far."""
_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22
_NUM_PROBES = 32


class Space:
    """Addresses into which files are mapped, for reading; free with the last array of them.

    Whoever reads where nothing is mapped, or after the end of a file that became shorter, ends the
    process (SIGBUS): check the size of the file before.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, offset: int = 0) -> None:
        """Reserve addresses for such an array, not of 0 bytes; no memory.

        ``offset`` is the byte of a file that will be at its start, for large pages. Raises
        ``OSError``: there are too few, for instance by ``ulimit -v``.
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

        Raises ``OSError``: the file system cannot map it, or bytes begin on no page.
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
        """Read the mapped bytes and wait for them; return whether they are in memory now.

        It is not where the disk fails, where the file has become shorter and before Linux 5.14.
        Nothing is copied, and the system reads in large pages where it has them: that takes a
        fifth of the CPU time of ``pread``.
        """
        return not advise_memory(self._start + place, num_bytes, _MADV_POPULATE_READ)

    def array(self) -> NDArray[Any]:
        """Return the mapped array; whatever shares its memory keeps it."""
        return np.asarray(self)

    def __del__(self) -> None:
        if hasattr(self, "_reserved"):
            unmap_memory(self._reserved, self._num_reserved)


def is_cached(descriptor: int, num_bytes: int) -> bool:
    """Return whether a file is in the page cache, by probes.

    Differs from mincore(2), which works for the owner of a file only and calls every page of other
    files resident: one byte here and there is read without waiting (``RWF_NOWAIT``).
    """
    byte = bytearray(1)
    try:
        return all(
            os.preadv(descriptor, [byte], num_bytes * probe // _NUM_PROBES, os.RWF_NOWAIT)
            for probe in range(_NUM_PROBES)
        )
    except OSError:
        # Not in the cache, or a file system that cannot answer.
        return False


Read = Callable[[int, int], memoryview]
"""Gives the bytes ``[begin, end)`` of a field; valid until the same thread asks again."""

_Piece: TypeAlias = tuple[int, int, int, int]
"""A block, its bytes from where and up to where, its crc32."""

READ_BYTES = 2 * MIB
"""Bytes of one read from a disk: more falls out of the caches before it is checked."""

_SCRATCH = threading.local()


class PlainBlocks:
    """The blocks of one field in one file."""

    def __init__(self, edges: Array, crcs: NDArray[np.uint32], read: Read) -> None:
        """Take the byte where each block begins, and the end, and what each crc32 must be."""
        self._edges, self._crcs, self._read = edges, crcs, read

    def wrong(self, blocks: Array) -> list[int]:
        """Return which of these blocks, which grow, cannot be read or have another crc32.

        Neighbours are read by one call, of about as many bytes as are best read at once.
        """
        if not len(blocks):
            return []
        begins = self._edges[blocks]
        follows = np.zeros(len(blocks), bool)
        follows[1:] = blocks[1:] == blocks[:-1] + 1
        reads = (begins - np.maximum.accumulate(np.where(follows, 0, begins))) // READ_BYTES
        follows[1:] &= reads[1:] == reads[:-1]
        columns = blocks, begins, self._edges[blocks + 1], self._crcs[blocks]
        pieces = list(zip(*[column.tolist() for column in columns], strict=True))
        starts = [*np.flatnonzero(~follows).tolist(), len(pieces)]
        return [
            block
            for start, stop in pairwise(starts)
            for block in self._wrong_of(pieces[start:stop])
        ]

    def _wrong_of(self, pieces: list[_Piece]) -> list[int]:
        """Check neighbours."""
        first = pieces[0][1]
        try:
            data = self._read(first, pieces[-1][2])
        except OSError:
            if len(pieces) == 1:
                return [pieces[0][0]]
            return [block for piece in pieces for block in self._wrong_of([piece])]
        return [
            block
            for block, begin, end, crc in pieces
            if crc32(data[begin - first : end - first]) != crc
        ]


def from_map(space: Space, offset: int, num_bytes: int, *, otherwise: Read) -> Read:
    """Read ``num_bytes`` from ``offset`` on where a file is mapped, once they are in memory.

    What cannot be brought there is read ``otherwise``, which says why it fails: to touch it would
    end the process.
    """
    data = space.array()[offset : offset + num_bytes].data

    def read(begin: int, end: int) -> memoryview:
        if space.bring(offset + begin, end - begin):
            return data[begin:end]
        return otherwise(begin, end)

    return read


def from_file(descriptor: int, offset: int) -> Read:
    """Read from an open file into memory that each thread keeps: fresh memory costs more.

    Unlike with mapped memory, a disk that fails is an error and not the end of the process.
    """

    def read(begin: int, end: int) -> memoryview:
        scratch = getattr(_SCRATCH, "bytes", b"")
        if len(scratch) < end - begin:
            scratch = _SCRATCH.bytes = bytearray(end - begin)
        view = memoryview(scratch)[: end - begin]
        if os.preadv(descriptor, [view], offset + begin) < len(view):
            read_into(descriptor, [view], offset + begin, len(view))
        return view

    return read
