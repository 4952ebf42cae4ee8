"""Open files of shards; errors name the samples that cannot be read."""

import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.core.atomic import reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import CorruptError
from hpctrain.core.libc import map_memory, memory_at, unmap_memory
from hpctrain.core.units import MIB
from hpctrain.data.format.dataset_manifest import Manifest, ShardEntry
from hpctrain.data.format.hdf5_values import UNREADABLE, is_compressed, load_filters, own_dataset
from hpctrain.data.io.values import (
    Array,
    CachedValues,
    ChunkCache,
    DirectValues,
    MappedValues,
    Values,
    read_at,
)

IO = Literal["map", "read", "auto"]

_KEPT_ROW_BYTES = 16
_KEPT_FIELD_BYTES = 64 * MIB
_SIGNATURE = b"\x89HDF\r\n\x1a\n"


class RawShard:
    """The open file of a shard, with tables and values that may be damaged.

    The constructor opens the file of shard ``index``, and raises ``OSError`` if that fails.
    """

    _map: NDArray[np.uint8] | None = None

    def __init__(self, path: Path, manifest: Manifest, index: int) -> None:
        self._path, self._manifest = path, manifest
        self.shard = manifest.shards[index]
        self._hdf5: Any = None
        self.descriptor = os.open(path, os.O_RDONLY)

    def table(self, name: str) -> NDArray[Any]:
        """Read the crc32 of each block of a field from the file."""
        shape = (self._manifest.num_blocks(self.shard),)
        return self._array(f"crc/{name}", self.shard.places[name].crc_offset, shape, "<u4")

    def index(self, name: str) -> Array:
        """Return the first row of each sample of a ragged field, then the number of rows."""
        place = self.shard.places[name]
        shape = (self.shard.num_samples + 1,)
        index = self._array(f"index/{name}", place.index_offset, shape, "<u8")
        _check_table(f"index/{name}", index, place.index_crc32)
        return index.view(np.int64)

    def values_of(self, name: str, chunks: ChunkCache) -> Values:
        """Return a reader of a field's values that does not map the file."""
        field, shape = self._manifest.fields[name], self._shape(name)
        offset = self.shard.places[name].offset
        if 0 in shape:
            return MappedValues(np.empty(shape, field.dtype))
        if offset is None:
            return CachedValues(self._dataset(f"data/{name}", shape, field.dtype), chunks)
        return DirectValues(self.descriptor, offset, field.shape, np.dtype(field.dtype))

    def close_hdf5(self) -> None:
        """Close the HDF5 handle, which HDF5 would otherwise reuse for the reopened file."""
        if self._hdf5 is not None:
            self._hdf5.close()

    def __del__(self) -> None:
        """Close the file. Mapped memory remains until no array refers to it."""
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def _shape(self, name: str) -> tuple[int, ...]:
        field, num_rows = self._manifest.fields[name], self.shard.places[name].num_rows
        return ((num_rows or 0) if field.ragged else self.shard.num_samples, *field.shape)

    def _plain(self, offset: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        num_bytes = prod(shape) * np.dtype(dtype).itemsize
        if self._map is None:
            found = read_at(self.descriptor, offset, num_bytes)
        else:
            found = self._map[offset : offset + num_bytes]
        return found.view(dtype).reshape(shape)

    def _array(
        self, what: str, offset: int | None, shape: tuple[int, ...], dtype: str
    ) -> NDArray[Any]:
        if offset is not None:
            return self._plain(offset, shape, dtype)
        return np.ascontiguousarray(self._dataset(what, shape, dtype)[:])

    def _dataset(self, what: str, shape: tuple[int, ...], dtype: str) -> Any:
        if self._hdf5 is None:
            load_filters(self._manifest.fields)
            self._hdf5 = open_hdf5(self._path)
        dataset = own_dataset(self._hdf5, what)
        # The checksum covers the values, but not their shape and dtype.
        is_dataset = isinstance(dataset, h5py.Dataset)
        if not is_dataset or (dataset.shape, dataset.dtype) != (shape, dtype):
            raise ValueError(f"/{what} differs from the manifest")
        return dataset


class ShardFile(RawShard):
    """The open file of a shard with valid tables, which records the blocks that were checked.

    If the file changes, ``OpenShard`` opens it again as another object.

    The constructor compares the size of the file, and its tables of checksums and row indices,
    with the manifest. It raises an exception of ``UNREADABLE`` if the file is missing, damaged, or
    belongs to another manifest.
    """

    def __init__(
        self, path: Path, manifest: Manifest, index: int, *, io: IO, chunks: ChunkCache
    ) -> None:
        super().__init__(path, manifest, index)
        self.block_size = manifest.block_size
        self.checked = np.zeros(manifest.num_blocks(self.shard), bool)
        """For each block, whether its crc32 was checked and is right."""
        self.all_checked = False
        self.identity = self._identity()
        """Device, inode, size and time of change: all equal as long as the file is unchanged."""
        if problem := size_problem(self.shard, self.identity[2]):
            raise ValueError(problem)
        if io == "map":
            self._map = _mapped(self.descriptor, self.shard.num_bytes)
        self._crcs = {name: self.table(name) for name in manifest.fields}
        for name, crcs in self._crcs.items():
            _check_table(f"crc/{name}", crcs, self.shard.places[name].crc32)
        self.indices = {
            name: self.index(name) for name, field in manifest.fields.items() if field.ragged
        }
        """For each ragged field the first row of each sample, then the number of rows."""
        if bytes(self._plain(0, (len(_SIGNATURE),), "|u1")) != _SIGNATURE:
            raise ValueError("the file does not begin with the signature of HDF5")
        self._unmapped = {name: self._unmapped_values(name, chunks) for name in manifest.fields}
        self.values = {name: self._mapped_values(name) for name in manifest.fields}

    @property
    def is_in_memory(self) -> bool:
        """Whether the file is mapped and all blocks were read, so that reads need no disk."""
        is_mapped = self._map is not None and not is_compressed(self._manifest.fields)
        return is_mapped and self.all_checked

    def is_changed(self) -> bool:
        """Return whether the file was written to or truncated since it was opened."""
        return self._identity() != self.identity

    def wrong_blocks(self, blocks: Array) -> list[int]:
        """Return the damaged blocks among ``blocks``; ``problem`` returns the fault of a block."""
        return [block for block in blocks.tolist() if self.problem(block)]

    def found(self, blocks: Array, wrong: list[int]) -> None:
        """Record blocks as checked, except the ``wrong`` blocks.

        Other threads read the flags concurrently, so the flag of a damaged block must never be
        set.
        """
        self.checked[wrong] = False
        self.checked[np.setdiff1d(blocks, wrong) if wrong else blocks] = True
        self.all_checked = bool(self.checked.all())

    def problem(self, block: int) -> str | None:
        """Return the fault of a block, or None if its crc32 is right.

        The values are read without the map, because a read error in a map ends the process.
        """
        start = block * self.block_size
        stop = min(start + self.block_size, self.shard.num_samples)
        for name, values in self._unmapped.items():
            index = self.indices.get(name)
            begin, end = (start, stop) if index is None else (int(index[start]), int(index[stop]))
            try:
                rows = values.between(begin, end)
            except UNREADABLE as error:
                first_line = str(error).partition("\n")[0]
                return f"block {block} of field {name} cannot be read ({first_line})"
            if crc32(rows.data) != self._crcs[name][block]:
                return f"block {block} of field {name} has the wrong crc32"
        return None

    def extents(self, starts: Array, stops: Array) -> list[tuple[Array, Array]]:
        """Return, for each field, the byte ranges of samples ``[starts[i], stops[i])``.

        Compressed fields, and fields that are kept in memory, are omitted.
        """
        found = []
        for name, place in self.shard.places.items():
            if place.offset is None or self._is_kept(name):
                continue
            index, size = self.indices.get(name), self._manifest.fields[name].sample_bytes
            rows = (starts, stops) if index is None else (index[starts], index[stops])
            found.append((place.offset + rows[0] * size, place.offset + rows[1] * size))
        return found

    def _identity(self) -> tuple[int, ...]:
        status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _is_kept(self, name: str) -> bool:
        """Return whether a field, such as labels, is small enough to be kept in memory."""
        field, num_samples = self._manifest.fields[name], self._manifest.num_samples
        size = field.sample_bytes
        is_small = size <= _KEPT_ROW_BYTES and num_samples * size <= _KEPT_FIELD_BYTES
        return is_small and not field.ragged and self.shard.places[name].offset is not None

    def _unmapped_values(self, name: str, chunks: ChunkCache) -> Values:
        values = self.values_of(name, chunks)
        if self._is_kept(name):
            return MappedValues(values.between(0, self.shard.num_samples))
        return values

    def _mapped_values(self, name: str) -> Values:
        values, offset = self._unmapped[name], self.shard.places[name].offset
        if self._map is None or offset is None or isinstance(values, MappedValues):
            return values
        dtype = self._manifest.fields[name].dtype
        return MappedValues(self._plain(offset, self._shape(name), dtype))


def _mapped(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map a file into memory, and unmap it when no array refers to the memory any more.

    Unlike ``mmap``, the mapping keeps no descriptor open.
    """
    address = map_memory(num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor=descriptor)
    segment = memory_at(address, num_bytes)
    weakref.finalize(segment, unmap_memory, address, num_bytes).atexit = False
    found: NDArray[np.uint8] = np.frombuffer(memoryview(segment), np.uint8)
    found.flags.writeable = False
    return found


def _check_table(what: str, table: NDArray[Any], want: int | None) -> None:
    if crc32(table.data) != want:
        raise ValueError(
            f"/{what} has the wrong crc32, so the file does not belong to the manifest"
        )


def size_problem(shard: ShardEntry, num_bytes: int) -> str:
    """Return the fault of a file of ``num_bytes``, or an empty string if its size is right."""
    if num_bytes == shard.num_bytes:
        return ""
    return (
        f"the file must have {shard.num_bytes} bytes by the manifest, got {num_bytes}, so it was "
        f"truncated or replaced"
    )


def open_hdf5(path: Path) -> h5py.File:
    """Open a file for reading, without locks and without HDF5's cache of values.

    Raises ``OSError``: the file is missing, or is not HDF5.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_file_locking(False, ignore_when_disabled=False)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    # ``ChunkCache`` keeps chunks, and a repeated read must reach the file.
    access.set_sieve_buf_size(0)
    access.set_cache(0, 0, 0, 0.0)
    return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, access))


def check_file(directory: Path, manifest: Manifest, index: int) -> None:
    """Check that the file of a shard exists and has the size in the manifest.

    Raises ``CorruptError``: the file is missing, inaccessible, or has another size.
    """
    shard = manifest.shards[index]
    path = directory / shard.file
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise _lost(directory, manifest, index, reason_of(error)) from error
    if problem := size_problem(shard, num_bytes):
        raise _lost(directory, manifest, index, problem)


class OpenShard:
    """Reader of the samples of one shard, for several threads of one process.

    A failed read is repeated once on the reopened file, because the error can be transient or the
    file can have been replaced. A forked process must open its own reader.

    Args:
        directory: directory of the data set.
        manifest: manifest of the data set.
        index: index of the shard in the manifest, from 0.
        io: as for ``ShardedDataset``, but ``auto`` does not map.
        chunks: cache of decoded chunks, which several shards may share.

    Raises:
        CorruptError: the file is missing, or is not the file that the manifest describes.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        index: int,
        *,
        io: IO = "auto",
        chunks: ChunkCache | None = None,
    ) -> None:
        self._manifest, self._index = manifest, index
        self._path = directory / manifest.shards[index].file
        self._lost = partial(_lost, directory, manifest, index)
        self._io, self._chunks = io, chunks or ChunkCache()
        self._lock = Lock()
        self.file = self._opened()

    def check_blocks(self, rows: Array, *, again: bool) -> None:
        """Check the crc32 of the blocks that contain the samples ``rows``.

        Without ``again``, blocks that were checked before are skipped. If the file was changed
        since it was opened, the file is reopened and no block counts as checked. Raises
        ``CorruptError``: a block is damaged, or the file belongs to another manifest.
        """
        file = self.file
        if file.is_changed():
            file = self._reopened(file)
        if file.all_checked and not again:
            return
        blocks = rows // self._manifest.block_size
        if not again:
            blocks = blocks[~file.checked[blocks]]
        blocks = np.unique(blocks)
        wrong = file.wrong_blocks(blocks)
        file.found(blocks, wrong)
        for block in wrong:
            self._check_block(block)

    def gather(self, name: str, rows: Array, out: NDArray[Any], places: Array | None) -> None:
        """Copy samples of a field that is not ragged to ``out``.

        Sample ``rows[i]`` of this shard is copied to ``out[places[i]]``, or to ``out[i]`` without
        places. Raises ``CorruptError``: the file cannot be read.
        """
        self._read(rows, lambda file: file.values[name].take(rows, out, places))

    def lengths(self, name: str, rows: Array) -> Array:
        """Return the lengths of samples of a ragged field."""
        index = self.file.indices[name]
        return index[rows + 1] - index[rows]

    def gather_ragged(self, name: str, rows: Array, out: NDArray[Any], starts: Array) -> None:
        """Copy samples of a ragged field to ``out``.

        Sample ``rows[i]`` of this shard is copied to ``out``, beginning at ``out[starts[i]]``.
        Raises ``CorruptError``: the file cannot be read.
        """
        lengths = self.lengths(name, rows)

        def copy(file: ShardFile) -> None:
            file.values[name].copy(file.indices[name][rows], lengths, out, starts)

        self._read(rows, copy)

    def _read(self, rows: Array, copy: Callable[[ShardFile], None]) -> None:
        file = self.file
        try:
            return copy(file)
        except UNREADABLE:
            file = self._reopened(file)
        try:
            copy(file)
        except UNREADABLE as error:
            for block in np.unique(rows // self._manifest.block_size).tolist():
                self._check_block(block)
            raise self._lost(reason_of(error)) from error

    def _check_block(self, block: int) -> None:
        file = self.file
        if file.problem(block) is not None:
            with suppress(OSError):  # empty the page cache, so that the next read reaches the disk
                os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            file = self._reopened(file)
            if (problem := file.problem(block)) is not None:
                start, end = self._manifest.samples_of(self._index)
                start += block * self._manifest.block_size
                stop = min(start + self._manifest.block_size, end)
                raise CorruptError(
                    f"shard {self._path} is damaged: {problem}; samples {start} to {stop - 1} of "
                    f"the data set cannot be read; copy the file again",
                    start,
                    stop,
                )
        file.found(np.array([block]), [])

    def _opened(self) -> ShardFile:
        try:
            return ShardFile(
                self._path, self._manifest, self._index, io=self._io, chunks=self._chunks
            )
        except UNREADABLE as error:
            raise self._lost(reason_of(error)) from error

    def _reopened(self, old: ShardFile) -> ShardFile:
        with self._lock:
            if self.file is old:
                old.close_hdf5()
                new = self._opened()
                if new.identity == old.identity:
                    new.checked[:] = old.checked
                    new.all_checked = old.all_checked
                self.file = new
            return self.file


def _lost(directory: Path, manifest: Manifest, index: int, why: str) -> CorruptError:
    start, stop = manifest.samples_of(index)
    return CorruptError(
        f"cannot read shard {directory / manifest.shards[index].file}: {why}; samples {start} to "
        f"{stop - 1} of the data set are in this shard; copy the file again, or check the mount",
        start,
        stop,
    )
