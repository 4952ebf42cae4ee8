"""The file of one shard, open: its values, what has been checked of it, and reading it ahead."""

import os
from concurrent.futures import Executor, Future
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.core.checksum import crc32
from hpctrain.core.units import KIB, MIB
from hpctrain.data.format.hdf5_values import UNREADABLE, is_compressed, load_filters, own_dataset
from hpctrain.data.format.layout import Manifest, ShardEntry
from hpctrain.data.io.mapped import PlainBlocks, Space, from_file, from_map, is_cached
from hpctrain.data.io.values import (
    Array,
    CachedValues,
    ChunkCache,
    DirectValues,
    MappedValues,
    Values,
    as_bytes,
    read_at,
)

IO = Literal["map", "read", "auto"]

_KEPT_ROW_BYTES = 16
_KEPT_FIELD_BYTES = 64 * MIB
_SIGNATURE = b"\x89HDF\r\n\x1a\n"


class RawShard:
    """The file of a shard in whatever state it is: anything that is read of it may be damaged."""

    _space: Space | None = None

    def __init__(self, path: Path, manifest: Manifest, index: int) -> None:
        """Open the file of the shard ``index``. Raises ``OSError``: it cannot be opened."""
        self._path, self._manifest = path, manifest
        self.shard = manifest.shards[index]
        self._hdf5: Any = None
        self.descriptor = os.open(path, os.O_RDONLY)

    def table(self, name: str) -> NDArray[Any]:
        """Return the crc32 of each block of a field, as the file has them."""
        shape = (self._manifest.num_blocks(self.shard),)
        return self._array(f"crc/{name}", self.shard.places[name].crc_offset, shape, "<u4")

    def index(self, name: str) -> Array:
        """Return between which rows of a ragged field each sample lies, ``(num_samples + 1,)``."""
        place = self.shard.places[name]
        shape = (self.shard.num_samples + 1,)
        index = self._array(f"index/{name}", place.index_offset, shape, "<u8")
        _check_table(f"index/{name}", index, place.index_crc32)
        return index.view(np.int64)

    def values_of(self, name: str, chunks: ChunkCache) -> Values:
        """Return what reads the values of a field as they are wanted."""
        field, shape = self._manifest.fields[name], self._shape(name)
        offset = self.shard.places[name].offset
        if 0 in shape:
            return MappedValues(np.empty(shape, field.dtype))
        if offset is None:
            return CachedValues(self._dataset(f"data/{name}", shape, field.dtype), chunks)
        return DirectValues(self.descriptor, offset, shape, np.dtype(field.dtype))

    def _shape(self, name: str) -> tuple[int, ...]:
        field, num_rows = self._manifest.fields[name], self.shard.places[name].num_rows
        return ((num_rows or 0) if field.ragged else self.shard.num_samples, *field.shape)

    def close_hdf5(self) -> None:
        """End all use of HDF5: what is open here would be shared with a file opened anew."""
        if self._hdf5 is not None:
            self._hdf5.close()

    def __del__(self) -> None:
        """Close the file; mapped memory stays as long as an array refers to it."""
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def _plain(self, offset: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        num_bytes = prod(shape) * np.dtype(dtype).itemsize
        if self._space is None:
            found = read_at(self.descriptor, offset, num_bytes)
        else:
            found = self._space.array()[offset : offset + num_bytes]
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
        # The checksum covers the values, not what HDF5 says of them.
        is_dataset = isinstance(dataset, h5py.Dataset)
        if not is_dataset or (dataset.shape, dataset.dtype) != (shape, dtype):
            raise ValueError(f"/{what} is not what the manifest says")
        return dataset


class ShardFile(RawShard):
    """Opened once; a file that changes is opened anew, as another object."""

    def __init__(
        self, path: Path, manifest: Manifest, index: int, *, io: IO, chunks: ChunkCache
    ) -> None:
        """Open the file and check that it is the one that the manifest describes.

        Raises ``UNREADABLE``: it is not, or it is missing or damaged.
        """
        super().__init__(path, manifest, index)
        self.block_size = manifest.block_size
        self.checked = np.zeros(manifest.num_blocks(self.shard), bool)
        """Blocks whose crc32 was right."""
        self.all_checked = False
        self.coming: dict[int, Future[None]] = {}  # blocks that are read ahead
        self.is_replaced = False  # whether the file was opened anew, as another object
        self.identity = self._identity()
        """Device, inode, size and time of change: all equal as long as the file is as it was."""
        if problem := size_problem(self.shard, self.identity[2]):
            raise ValueError(problem)
        self.was_cached = is_cached(self.descriptor, self.shard.num_bytes)
        """Whether it lay in memory when it was opened."""
        self.is_mapped = io == "map" or (io == "auto" and self.was_cached)
        self._space = self._mapped() if self.is_mapped else None
        self.crcs = {name: self._checked_table(name) for name in manifest.fields}
        self.indices = {
            name: self.index(name) for name, field in manifest.fields.items() if field.ragged
        }
        """Of ragged fields: between which rows each sample lies, ``(num_samples + 1,)``."""
        if bytes(self._plain(0, (len(_SIGNATURE),), "|u1")) != _SIGNATURE:
            raise ValueError("it is not the file that its manifest describes: it is not HDF5")
        self.values = {name: self.values_of(name, chunks) for name in manifest.fields}
        self._has_filters = is_compressed(manifest.fields)
        self._plain_blocks = [
            self._blocks_of(name, place.offset)
            for name, place in self.shard.places.items()
            if place.offset is not None
        ]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, about."""
        return max(1, self.block_size * self.shard.num_bytes // self.shard.num_samples)

    def is_kept(self, name: str) -> bool:
        """Return whether a field is as labels are: a call for each costs more than to keep all."""
        field, place = self._manifest.fields[name], self.shard.places[name]
        size = field.sample_bytes
        is_small = (
            size <= _KEPT_ROW_BYTES and self._manifest.num_samples * size <= _KEPT_FIELD_BYTES
        )
        return is_small and not field.ragged and place.offset is not None

    def is_changed(self) -> bool:
        """Return whether the file was written to or truncated since it was opened."""
        return self._identity() != self.identity

    def wrong_blocks(self, blocks: Array) -> list[int]:
        """Return which of these blocks are not as they were written; ``problem`` says why."""
        wrong = {block for field in self._plain_blocks for block in field.wrong(blocks)}
        if self._has_filters:
            wrong.update(block for block in blocks.tolist() if self.problem(block))
        return sorted(wrong)

    def bring(self, blocks: Array) -> None:
        """Read and check blocks, unless that was done; what is wrong stays unchecked.

        So does a file that was changed: to touch what a map has lost ends the process.
        """
        # What is asked for here comes in small pages, which a map then takes one by one.
        if not self.is_mapped:
            _advise_blocks(self, blocks)
        new = blocks[~self.checked[blocks]]
        if not self.is_changed():
            self.found(new, self.wrong_blocks(new))

    def wait_for(self, blocks: Array) -> None:
        """Return when none of these blocks is on its way."""
        for block in blocks.tolist():
            if (future := self.coming.get(block)) is not None:
                future.exception()

    def found(self, blocks: Array, wrong: list[int]) -> None:
        """Count blocks as checked but for those that are wrong.

        Other threads look meanwhile: what is wrong does not count as checked at any time.
        """
        self.checked[wrong] = False
        self.checked[np.setdiff1d(blocks, wrong) if wrong else blocks] = True
        self.all_checked = bool(self.checked.all())

    def problem(self, block: int) -> str | None:
        """Return what is wrong with a block, None if its crc32 is right."""
        start = block * self._manifest.block_size
        stop = min(start + self._manifest.block_size, self.shard.num_samples)
        for name, values in self.values.items():
            index = self.indices.get(name)
            begin, end = (start, stop) if index is None else (int(index[start]), int(index[stop]))
            try:
                rows = values.between(begin, end)
            except UNREADABLE as error:
                first_line = str(error).partition("\n")[0]
                return f"block {block} of field {name} cannot be read ({first_line})"
            if crc32(rows.data) != self.crcs[name][block]:
                return f"block {block} of field {name} has the wrong crc32"
        return None

    def extents(self, starts: Array, stops: Array) -> list[tuple[Array, Array]]:
        """Return where samples ``[starts[i], stops[i])`` lie: of each field, from byte, to byte.

        Of filtered fields and of those that were read already nothing is told.
        """
        found = []
        for name, place in self.shard.places.items():
            if place.offset is None or self.is_kept(name):
                continue
            index, size = self.indices.get(name), self._manifest.fields[name].sample_bytes
            rows = (starts, stops) if index is None else (index[starts], index[stops])
            found.append((place.offset + rows[0] * size, place.offset + rows[1] * size))
        return found

    def _identity(self) -> tuple[int, ...]:
        status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _mapped(self) -> Space:
        space = Space((self.shard.num_bytes,), "|u1")
        space.map_file(0, self.descriptor, 0, self.shard.num_bytes)
        return space

    def _blocks_of(self, name: str, offset: int) -> PlainBlocks:
        size = self._manifest.fields[name].sample_bytes
        edges = np.arange(len(self.checked) + 1) * self._manifest.block_size
        edges[-1] = self.shard.num_samples
        if name in self.indices:
            edges = self.indices[name][edges]
        edges *= size
        if self.is_kept(name):
            data = as_bytes(self.values[name].between(0, self.shard.num_samples))
            return PlainBlocks(edges, self.crcs[name], lambda begin, end: data[begin:end])
        read = from_file(self.descriptor, offset)
        if self._space is not None:
            read = from_map(self._space, offset, int(edges[-1]), otherwise=read)
        return PlainBlocks(edges, self.crcs[name], read)

    def _checked_table(self, name: str) -> NDArray[Any]:
        crcs = self.table(name)
        _check_table(f"crc/{name}", crcs, self.shard.places[name].crc32)
        return crcs

    def values_of(self, name: str, chunks: ChunkCache) -> Values:
        """Return the values of a field: kept, mapped, or read as they are wanted."""
        field, shape = self._manifest.fields[name], self._shape(name)
        offset = self.shard.places[name].offset
        if offset is None or 0 in shape or not (self.is_mapped or self.is_kept(name)):
            return super().values_of(name, chunks)
        if not self.is_kept(name):
            return MappedValues(self._plain(offset, shape, field.dtype))
        data = read_at(self.descriptor, offset, shape[0] * field.sample_bytes)
        return MappedValues(data.view(field.dtype).reshape(shape))


def _check_table(what: str, table: NDArray[Any], want: int | None) -> None:
    if crc32(table.data) != want:
        raise ValueError(
            f"it is not the file that its manifest describes: /{what} has the wrong crc32"
        )


def size_problem(shard: ShardEntry, num_bytes: int) -> str:
    """Say what is wrong with a file of so many bytes, if it is not as it was written."""
    if num_bytes == shard.num_bytes:
        return ""
    return (
        f"it has {shard.num_bytes} bytes by its manifest, got {num_bytes}: "
        f"it was truncated or replaced"
    )


def open_hdf5(path: Path) -> h5py.File:
    """Open a file for reading whatever locks it has; HDF5 keeps no values of it in memory.

    Raises ``OSError``: it is missing, or not HDF5.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_file_locking(False, ignore_when_disabled=False)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    # Chunks are kept by us, and what is read again must come from the file.
    access.set_sieve_buf_size(0)
    access.set_cache(0, 0, 0, 0.0)
    return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, access))


THREADS = 4  # while one looks at what it has read, others keep the disk busy
_PIECE_BYTES = 4 * MIB  # of blocks that one thread reads in a row
_REQUEST_BYTES = 128 * KIB
"""Linux reads no more than its read-ahead window for one request, 128 KiB unless it was set."""
_GAP_BYTES = 16 * KIB


def read_ahead(threads: Executor, file: ShardFile, rows: Array, *, check: bool) -> None:
    """Let threads bring rows of a file into memory, in its order, and return at once.

    ``check`` brings the whole of their blocks, and checks those that are new; who takes samples
    waits for it by ``ShardFile.wait_for``. What is wrong is left to him.
    """
    if file.was_cached or not len(rows):
        return
    if not check:
        threads.submit(_advise, file, *runs_of(distinct(rows)))
        return
    blocks = distinct(rows // file.block_size)
    is_new = ~file.checked[blocks]
    threads.submit(_advise_blocks, file, blocks[~is_new])
    new = blocks[is_new]
    num_pieces = min(len(new), -(-len(new) * file.block_bytes // _PIECE_BYTES))
    for piece in np.array_split(new, num_pieces) if num_pieces else []:
        numbers = piece.tolist()
        future = threads.submit(file.bring, piece)
        file.coming.update(dict.fromkeys(numbers, future))
        future.add_done_callback(partial(_arrived, file, numbers))


def runs_of(numbers: Array) -> tuple[Array, Array]:
    """Return the starts and stops of the runs of consecutive numbers, which grow."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = numbers[np.concatenate(([0], cuts))]
    stops = numbers[np.concatenate((cuts, [len(numbers)])) - 1] + 1
    return starts, stops


def distinct(numbers: Array) -> Array:
    """Return each number once, in order: what ``np.unique`` does, fast where they grow."""
    steps = np.diff(numbers)
    if (steps < 0).any():
        return np.unique(numbers)
    return numbers[np.concatenate(([True], steps > 0))]


def _arrived(file: ShardFile, blocks: list[int], future: Future[None]) -> None:
    for block in blocks:
        if file.coming.get(block) is future:
            file.coming.pop(block, None)


def _advise_blocks(file: ShardFile, blocks: Array) -> None:
    """Ask the disk for blocks, which grow, maybe none."""
    if len(blocks):
        starts, stops = runs_of(blocks)
        size = file.block_size
        _advise(file, starts * size, np.minimum(stops * size, file.shard.num_samples))


def _advise(file: ShardFile, starts: Array, stops: Array) -> None:
    """Ask the disk for the samples ``[starts[i], stops[i])``, which grow, all at the same time."""
    for begins, ends in file.extents(starts, stops):
        start = stop = 0
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if begin > stop + _GAP_BYTES:
                _request(file.descriptor, start, stop)
                start = begin
            stop = max(stop, end)
        _request(file.descriptor, start, stop)


def _request(descriptor: int, start: int, stop: int) -> None:
    for piece in range(start, stop, _REQUEST_BYTES):
        size = min(_REQUEST_BYTES, stop - piece)
        os.posix_fadvise(descriptor, piece, size, os.POSIX_FADV_WILLNEED)
