"""Whether blocks of a field are as they were written, where its bytes lie plainly in the file."""

import os
import threading
import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.reading.direct import read_into
from hpctrain.data.reading.values import Array

Read = Callable[[int, int], memoryview]
"""Gives the bytes ``[begin, end)`` of a field; valid until the same thread asks again."""

_SCRATCH = threading.local()


class PlainBlocks:
    """The blocks of one field in one file."""

    def __init__(self, edges: Array, crcs: NDArray[np.uint32], read: Read) -> None:
        """Take what is needed to check them.

        Args:
            edges: ``(num_blocks + 1,)``, the byte where each block begins, and the end.
            crcs: ``(num_blocks,)``.
            read: gives bytes of the field.
        """
        self._edges, self._crcs, self._read = edges, crcs, read

    def wrong(self, blocks: Array) -> list[int]:
        """Return which of these blocks cannot be read, or have another crc32."""
        columns = blocks, self._edges[blocks], self._edges[blocks + 1], self._crcs[blocks]
        return [
            block
            for block, begin, end, crc in zip(*(c.tolist() for c in columns), strict=True)
            if not self._is_right(begin, end, crc)
        ]

    def _is_right(self, begin: int, end: int, crc: int) -> bool:
        try:
            return zlib.crc32(self._read(begin, end)) == crc
        except OSError:
            return False


def from_memory(values: NDArray[np.uint8]) -> Read:
    """Read from the mapped bytes of a field."""
    view = values.data
    return lambda begin, end: view[begin:end]


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
