"""The blocks of one shard by plain reads, whatever state its file is in.

Differs from the reader of training: no memory map, as a page that the disk cannot read would end
the process; no check at open, as what is still whole of a damaged file is wanted; and HDF5 is
asked only where the manifest knows no offset, as damaged metadata can lead it anywhere.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from hpctrain.core.checksum import crc32
from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB
from hpctrain.data.format import hdf5_values
from hpctrain.data.format.layout import Manifest
from hpctrain.data.io.shardfile import RawShard
from hpctrain.data.io.values import Array, ChunkCache, read_into

UNREADABLE = (*hdf5_values.UNREADABLE, DataError)
"""What a damaged file leads to, below and in HDF5."""

PIECE_BYTES = 4 * MIB  # of a file, read at once


class ShardBlocks(RawShard):
    """Reads blocks of one shard; an OSError where the file is missing or cannot be opened."""

    def __init__(self, directory: Path, manifest: Manifest, index: int) -> None:
        super().__init__(directory / manifest.shards[index].file, manifest, index)
        self.number = index
        self.num_blocks = manifest.num_blocks(self.shard)
        self.num_bytes = os.fstat(self.descriptor).st_size

    def samples(self, start: int, stop: int) -> tuple[int, int]:
        """Return which samples of the data set the blocks ``[start, stop)`` are."""
        size, (first, _) = self._manifest.block_size, self._manifest.samples_of(self.number)
        return first + start * size, first + min(stop * size, self.shard.num_samples)

    def holds(self, name: str) -> bool:
        """Say whether the values lie in this file: what only HDF5 can read may be elsewhere."""
        with suppress(*UNREADABLE):
            self.values_of(name, ChunkCache(0))
            return True
        return False

    def bounds(self, name: str) -> Array:
        """Return the rows of ``/data/<name>`` at which blocks begin, and the last one's end.

        Raises ``UNREADABLE``: the index of a ragged field is damaged.
        """
        firsts = np.arange(self.num_blocks + 1) * self._manifest.block_size
        samples = np.minimum(firsts, self.shard.num_samples)
        return self.index(name)[samples] if self._manifest.fields[name].ragged else samples

    def crcs(self, name: str, bounds: Array) -> list[int | None]:
        """Return the crc32 of each block of a field, decoded; None where it cannot be read."""
        found: list[int | None] = [None] * self.num_blocks
        with suppress(*UNREADABLE):
            values = self.values_of(name, ChunkCache(0))  # which keeps the last chunk alone
            for block in range(self.num_blocks):
                start, stop = int(bounds[block]), int(bounds[block + 1])
                with suppress(*UNREADABLE):
                    rows = values.between(start, stop) if start < stop else np.empty(0, "u1")
                    found[block] = crc32(np.ascontiguousarray(rows).data)
        return found

    def file_crc32(self, advance: Callable[[int], None]) -> int | None:
        """Return the crc32 of all bytes of the file; None where the disk cannot read some.

        Tells ``advance`` how many bytes are done.
        """
        crc: int | None = 0
        buffer = memoryview(bytearray(min(PIECE_BYTES, self.num_bytes)))
        for start in range(0, self.num_bytes, PIECE_BYTES):
            piece = buffer[: self.num_bytes - start]
            try:
                read_into(self.descriptor, [piece], start, len(piece))
            except OSError:
                crc = None
            else:
                crc = None if crc is None else crc32(piece, crc)
            advance(len(piece))
        return crc
