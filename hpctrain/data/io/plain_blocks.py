"""Checks of blocks whose bytes lie plainly in the file."""

import os
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.checksum import crc32
from hpctrain.core.units import MIB
from hpctrain.data.io.mapped import Space
from hpctrain.data.io.values import Array, read_into

Read = Callable[[int, int], memoryview]
"""Gives the bytes ``[begin, end)`` of a field; valid until the same thread asks again."""

_Piece: TypeAlias = tuple[int, int, int, int]
"""A block, its bytes from where and up to where, its crc32."""

READ_BYTES = 2 * MIB
"""What a disk is best asked for at once: more falls out of the caches before it is looked at."""

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
        pieces = _pieces(blocks, self._edges, self._crcs)
        starts = [*np.flatnonzero(~follows).tolist(), len(pieces)]
        return [
            block
            for start, stop in pairwise(starts)
            for block in self._wrong_of(pieces[start:stop])
        ]

    def _wrong_of(self, pieces: list[_Piece]) -> list[int]:
        """Look at neighbours."""
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


def _pieces(blocks: Array, edges: Array, crcs: NDArray[np.uint32]) -> list[_Piece]:
    columns = blocks, edges[blocks], edges[blocks + 1], crcs[blocks]
    return list(zip(*[column.tolist() for column in columns], strict=True))


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
