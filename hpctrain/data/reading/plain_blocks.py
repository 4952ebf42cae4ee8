"""Whether blocks of a field are as they were written, where its bytes lie plainly in the file."""

import os
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hpctrain.checksum import crc32
from hpctrain.data.reading.ahead import runs_of
from hpctrain.data.reading.direct import read_into
from hpctrain.data.reading.values import Array
from hpctrain.units import MIB

Read = Callable[[int, int], memoryview]
"""Gives the bytes ``[begin, end)`` of a field; valid until the same thread asks again."""

READ_BYTES = 2 * MIB
"""What a disk is best asked for at once: more falls out of the caches before it is looked at."""

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
        """Return which of these blocks cannot be read, or have another crc32.

        Neighbours are read by one call.
        """
        return [block for run in self._runs(blocks) for block in self._wrong_of(run)]

    def _runs(self, blocks: Array) -> Iterator[range]:
        """Cut blocks into runs of neighbours, of about as many bytes as are best read at once."""
        if not len(blocks):
            return
        starts, stops = runs_of(blocks)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            num_bytes = int(self._edges[stop] - self._edges[start])
            length = max(1, READ_BYTES * (stop - start) // max(1, num_bytes))
            for first in range(start, stop, length):
                yield range(first, min(first + length, stop))

    def _wrong_of(self, run: range) -> list[int]:
        edges = self._edges[run.start : run.stop + 1].tolist()
        try:
            data = self._read(edges[0], edges[-1])
        except OSError:
            return (
                [run[0]]
                if len(run) == 1
                else [b for one in run for b in self._wrong_of(range(one, one + 1))]
            )
        base = edges[0]
        crcs = self._crcs[run.start : run.stop].tolist()
        pieces = zip(run, pairwise(edges), crcs, strict=True)
        return [block for block, (a, b), crc in pieces if crc32(data[a - base : b - base]) != crc]


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
