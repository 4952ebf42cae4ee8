"""The blocks of one shard by plain reads, whatever state its file is in.

Differs from the reader of training: no memory map, as a page that the disk cannot read would end
the process; no check at open, as what is still whole of a damaged file is wanted; and HDF5 is
asked only where the manifest knows no offset, as damaged metadata can lead it anywhere.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.core.checksum import crc32
from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB
from hpctrain.data.format import hdf5_values
from hpctrain.data.format.hdf5_values import own_dataset
from hpctrain.data.format.layout import Manifest

UNREADABLE = (*hdf5_values.UNREADABLE, DataError)
"""What a damaged file leads to, below and in HDF5."""

PIECE_BYTES = 4 * MIB  # of a file, read at once

_CACHE_BYTES = 16 * MIB  # for chunks, of which each has several blocks


class ShardBlocks:
    """Reads blocks of one shard; an OSError where the file is missing or cannot be opened."""

    def __init__(self, directory: Path, manifest: Manifest, index: int) -> None:
        self.manifest = manifest
        self.shard = manifest.shards[index]
        self.index = index
        self.path = directory / self.shard.file
        self.first_sample = manifest.samples_of(index)[0]
        self.num_blocks = manifest.num_blocks(self.shard)
        self._hdf5: Any = None
        self.offsets = cache(self._read_offsets)
        """Where each sample of a ragged field begins, ``(num_samples + 1,)``."""
        self.bounds = cache(self._cut_bounds)
        """Rows of ``/data/<name>`` at which blocks begin, and the last one's end."""
        self._descriptor = os.open(self.path, os.O_RDONLY)
        self.num_bytes = os.fstat(self._descriptor).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.offsets.cache_clear()
        self.bounds.cache_clear()
        os.close(self._descriptor)
        if self._hdf5 is not None:
            self._hdf5.close()

    def samples(self, start: int, stop: int) -> tuple[int, int]:
        """Return which samples of the data set the blocks ``[start, stop)`` are."""
        size = self.manifest.block_size
        last = min(stop * size, self.shard.num_samples)
        return self.first_sample + start * size, self.first_sample + last

    def table(self, name: str) -> NDArray[Any]:
        """Return the crc32 of each block of a field as the file has it, damaged or not.

        Raises ``UNREADABLE``: it cannot be had.
        """
        offset = self.shard.places[name].crc_offset
        return self._array(f"crc/{name}", offset, (self.num_blocks,), "<u4")

    def holds(self, name: str) -> bool:
        """Say whether the values lie in this file: what only HDF5 can read may be elsewhere."""
        if self.shard.places[name].offset is not None:
            return True
        with suppress(*UNREADABLE):
            self._values(name)
            return True
        return False

    def crc(self, name: str, block: int) -> int | None:
        """Return the crc32 of a block of a field, decoded; None where it cannot be read."""
        with suppress(*UNREADABLE):
            return crc32(self._read(name, block).data)
        return None

    def file_crc32(self, advance: Callable[[int], None]) -> int | None:
        """Return the crc32 of all bytes of the file; None where the disk cannot read some.

        Tells ``advance`` how many bytes are done.
        """
        crc: int | None = 0
        buffer = memoryview(bytearray(min(PIECE_BYTES, self.num_bytes)))
        for start in range(0, self.num_bytes, PIECE_BYTES):
            piece = buffer[: self.num_bytes - start]
            try:
                self._read_into(piece, start)
            except OSError:
                crc = None
            else:
                crc = None if crc is None else crc32(piece, crc)
            advance(len(piece))
        return crc

    def _read(self, name: str, block: int) -> NDArray[Any]:
        field, bounds = self.manifest.fields[name], self.bounds(name)
        first, last = int(bounds[block]), int(bounds[block + 1])
        shape = (last - first, *field.shape)
        offset = self.shard.places[name].offset
        if 0 in shape:
            return np.empty(shape, field.dtype)
        if offset is None:
            return np.ascontiguousarray(self._values(name)[first:last])
        return self._array("", offset + first * field.sample_bytes, shape, field.dtype)

    def _values(self, name: str) -> Any:
        field = self.manifest.fields[name]
        return self._dataset(
            f"data/{name}", (int(self.bounds(name)[-1]), *field.shape), field.dtype
        )

    def _read_into(self, target: memoryview, start: int) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], start + done)
            if not count:
                raise OSError(errno.EIO, f"the file ends at byte {start + done}")
            done += count

    def _read_offsets(self, name: str) -> NDArray[np.int64]:
        place = self.shard.places[name]
        shape = (self.shard.num_samples + 1,)
        offsets = self._array(f"index/{name}", place.index_offset, shape, "<u8")
        if crc32(offsets.data) != place.index_crc32:
            raise DataError("it has the wrong crc32")
        return offsets.astype(np.int64)

    def _cut_bounds(self, name: str) -> NDArray[np.int64]:
        firsts = np.arange(self.num_blocks + 1) * self.manifest.block_size
        samples = np.minimum(firsts, self.shard.num_samples)
        return self.offsets(name)[samples] if self.manifest.fields[name].ragged else samples

    def _array(
        self, path: str, offset: int | None, shape: tuple[int, ...], dtype: str
    ) -> NDArray[Any]:
        if offset is None:
            return np.ascontiguousarray(self._dataset(path, shape, dtype)[:])
        rows = np.empty(shape, dtype)
        self._read_into(rows.data.cast("B"), offset)
        return rows

    def _dataset(self, path: str, shape: tuple[int, ...], dtype: str) -> Any:
        if self._hdf5 is None:
            self._hdf5 = h5py.File(self.path, "r", locking=False, rdcc_nbytes=_CACHE_BYTES)
        dataset = own_dataset(self._hdf5, path)
        found = getattr(dataset, "shape", None), getattr(dataset, "dtype", None)
        if found != (shape, np.dtype(dtype)):
            raise DataError(f"/{path} is not what the manifest says")
        return dataset
