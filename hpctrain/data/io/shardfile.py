"""The file of one shard, open: its values, its checksums and what has been checked of it."""

import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from threading import Event, Lock
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.core.checksum import crc32
from hpctrain.core.units import KIB, MIB
from hpctrain.data.format.compression import is_compressed, load_filters
from hpctrain.data.format.layout import Field, Manifest, Place
from hpctrain.data.format.own import UNREADABLE, own_dataset
from hpctrain.data.io.chunks import CachedValues, ChunkCache, chunk_rows_for
from hpctrain.data.io.direct import read_at
from hpctrain.data.io.mapped import Space
from hpctrain.data.io.plain_blocks import MappedBlocks, PlainBlocks, Read, from_file, from_map
from hpctrain.data.io.residency import in_memory, on_local_disk
from hpctrain.data.io.values import Array, DirectValues, MappedValues, Values

IO = Literal["map", "read", "auto"]
"""What a user may wish."""
ShardIO = Literal[IO, "keep"]
"""``keep`` is ``auto`` for a data set that stays in memory once it was read."""

_SMALL_ROW_BYTES = 64
_SMALL_FIELD_BYTES = 16 * MIB
_SMALL_SAMPLE_BYTES = 16 * KIB
_SIGNATURE = b"\x89HDF\r\n\x1a\n"


class ShardFile:
    """Opened once; a file that changes is opened anew, as another object."""

    def __init__(
        self, path: Path, manifest: Manifest, index: int, *, io: ShardIO, chunks: ChunkCache
    ) -> None:
        """Open the file and check that it is the one that the manifest describes.

        Raises:
            UNREADABLE: it is not, or it is missing or damaged.
        """
        self._path, self._manifest, self._io = path, manifest, io
        self.shard = manifest.shards[index]
        self.block_size = manifest.block_size
        self.checked = np.zeros(manifest.num_blocks(self.shard), bool)
        """Blocks whose crc32 was right."""
        self.all_checked = False
        self.arrivals = Arrivals(len(self.checked))
        self.is_replaced = False
        """Whether the file was opened anew, as another object."""
        self._hdf5: Any = None
        self.descriptor = os.open(path, os.O_RDONLY)
        self.identity = self._identity()
        """Device, inode, size and time of change: all equal as long as the file is as it was."""
        self._check_size()
        self.in_memory = in_memory(self.descriptor, self.shard.num_bytes)
        self.is_mapped = io == "map" or (
            io != "read" and (self.in_memory or self._is_mapped_on_disk())
        )
        self.space = self._mapping() if self.is_mapped else None
        self._swept = Event()
        self.crcs = {name: self._table(name) for name in manifest.fields}
        self.indices = {
            name: self._index(name) for name, field in manifest.fields.items() if field.ragged
        }
        """Of ragged fields: between which rows each sample lies, ``(num_samples + 1,)``."""
        if bytes(self._plain(0, (len(_SIGNATURE),), "|u1")) != _SIGNATURE:
            raise ValueError("it is not the file that its manifest describes: it is not HDF5")
        self.values = {
            name: self._values(name, field, chunks) for name, field in manifest.fields.items()
        }
        self.read_on = [name for name in manifest.fields if not self._is_read_at_once(name)]
        """The fields that are read as they are wanted."""
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

    @property
    def is_swept(self) -> bool:
        """Whether it is read whole, as it lies, by its map."""
        return self._swept.is_set()

    def sweep(self) -> None:
        """Read it so from now on; it is mapped."""
        self._swept.set()

    def is_changed(self) -> bool:
        """Return whether the file was written to or truncated since it was opened."""
        return self._identity() != self.identity

    def wants_map(self) -> bool:
        """Return whether the file, as it lies now, is better mapped than read.

        Where it lies in memory; and on a local disk, where it stays in memory once it was read,
        and samples so small that a call for each of them costs more than to bring in its page.
        Their blocks are checked by reading first.
        """
        return in_memory(self.descriptor, self.shard.num_bytes) or self._is_mapped_on_disk()

    def wrong_blocks(self, blocks: Array) -> list[int]:
        """Return which of these blocks are not as they were written; ``problem`` says why."""
        wrong = {block for field in self._plain_blocks for block in field.wrong(blocks)}
        if self._has_filters:
            wrong.update(block for block in blocks.tolist() if self.problem(block))
        return sorted(wrong)

    def bring(self, blocks: Array, then: Callable[[Array], None] | None = None) -> None:
        """Read and check blocks, unless that was done; what is wrong stays unchecked.

        So does a file that was changed: to touch what a map has lost ends the process. With what
        is new and right, ``then`` is called, before whoever waits for the blocks goes on.
        """
        self.arrivals.expect(blocks)
        try:
            new = blocks[~self.checked[blocks]]
            if not self.is_changed():
                self.found(new, wrong := self.wrong_blocks(new))
                if then and (right := np.setdiff1d(new, wrong)).size:
                    then(right)
        finally:
            self.arrivals.arrived(blocks)

    def found(self, blocks: Array, wrong: list[int]) -> None:
        """Count blocks as checked but for those that are wrong.

        Other threads look meanwhile: what is wrong does not count as checked at any time.
        """
        self.checked[wrong] = False
        self.checked[np.setdiff1d(blocks, wrong) if wrong else blocks] = True

    def rows_of(self, name: str, starts: Array, stops: Array) -> tuple[Array, Array]:
        """Return which rows of a field are the samples ``[starts[i], stops[i])``."""
        index = self.indices.get(name)
        return (starts, stops) if index is None else (index[starts], index[stops])

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
                return f"block {block} of field {name} cannot be read ({_first_line(error)})"
            if crc32(rows.data) != self.crcs[name][block]:
                return f"block {block} of field {name} has the wrong crc32"
        return None

    def extents(self, name: str, starts: Array, stops: Array) -> tuple[Array, Array]:
        """Return where samples lie in the file: from byte, to byte."""
        return self.values[name].extents(*self.rows_of(name, starts, stops))

    def close_hdf5(self) -> None:
        """End all use of HDF5: what is open here would be shared with a file opened anew."""
        if self._hdf5 is not None:
            self._hdf5.close()

    def __del__(self) -> None:
        """Close the file; mapped memory stays as long as an array refers to it."""
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def _is_mapped_on_disk(self) -> bool:
        mean_bytes = self.shard.num_bytes / self.shard.num_samples
        is_better = self._io == "keep" or mean_bytes <= _SMALL_SAMPLE_BYTES
        return is_better and on_local_disk(self.descriptor)

    def _identity(self) -> tuple[int, ...]:
        status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _check_size(self) -> None:
        if self.identity[2] != self.shard.num_bytes:
            raise ValueError(
                f"it has {self.shard.num_bytes} bytes by its manifest, got {self.identity[2]}: "
                f"it was truncated or replaced"
            )

    def _mapping(self) -> Space:
        space = Space(self.shard.num_bytes)
        space.map_file(0, self.descriptor, 0, self.shard.num_bytes)
        return space

    def _plain(self, offset: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        if self.space is not None:
            return self.space.array(offset, shape, dtype)
        num_bytes = prod(shape) * np.dtype(dtype).itemsize
        return read_at(self.descriptor, offset, num_bytes).view(dtype).reshape(shape)

    def _blocks_of(self, name: str, offset: int) -> MappedBlocks | PlainBlocks:
        size = self._manifest.fields[name].sample_bytes
        edges = np.arange(len(self.checked) + 1) * self._manifest.block_size
        edges[-1] = self.shard.num_samples
        if name in self.indices:
            edges = self.indices[name][edges]
        edges *= size
        num_bytes = int(edges[-1])
        if self._is_read_at_once(name) or (self.space is not None and self.in_memory):
            return MappedBlocks(edges, self.crcs[name], self._plain(offset, (num_bytes,), "|u1"))
        return PlainBlocks(edges, self.crcs[name], self._reading(offset, num_bytes))

    def _reading(self, offset: int, num_bytes: int) -> Read:
        """Return what reads a field: by its map, once the file is swept."""
        plainly = from_file(self.descriptor, offset)
        if self.space is None:
            return plainly
        values = self._plain(offset, (num_bytes,), "|u1")
        return from_map(self.space, offset, values, plainly, when=self._swept.is_set)

    def _is_read_at_once(self, name: str) -> bool:
        """Return whether a field is as labels are: a call for each block of it costs more."""
        field, place = self._manifest.fields[name], self.shard.places[name]
        num_bytes = self._num_rows(field, place) * field.sample_bytes
        is_small = field.sample_bytes <= _SMALL_ROW_BYTES and num_bytes <= _SMALL_FIELD_BYTES
        return is_small and place.offset is not None

    def _table(self, name: str) -> NDArray[Any]:
        place = self.shard.places[name]
        crcs = self._array(f"crc/{name}", place.crc_offset, self.checked.shape, "<u4")
        self._check_table(f"crc/{name}", crcs, place.crc32)
        return crcs

    def _index(self, name: str) -> Array:
        place = self.shard.places[name]
        shape = (self.shard.num_samples + 1,)
        index = self._array(f"index/{name}", place.index_offset, shape, "<u8")
        self._check_table(f"index/{name}", index, place.index_crc32)
        return index.view(np.int64)

    def _check_table(self, what: str, table: NDArray[Any], want: int | None) -> None:
        if crc32(table.data) != want:
            raise ValueError(
                f"it is not the file that its manifest describes: /{what} has the wrong crc32"
            )

    def _array(
        self, what: str, offset: int | None, shape: tuple[int, ...], dtype: str
    ) -> NDArray[Any]:
        if offset is not None:
            return self._plain(offset, shape, dtype)
        return np.ascontiguousarray(self._dataset(what, shape, dtype)[:])

    def _values(self, name: str, field: Field, chunks: ChunkCache) -> Values:
        place = self.shard.places[name]
        shape = (self._num_rows(field, place), *field.shape)
        if not prod(shape) * np.dtype(field.dtype).itemsize:
            return MappedValues(np.empty(shape, field.dtype), 0)
        if place.offset is None:
            stored = HDF5Values(self._dataset(f"data/{name}", shape, field.dtype))
            return CachedValues(stored, shape[0], stored.chunk_rows, chunks)
        if self.space is not None:
            return MappedValues(self.space.array(place.offset, shape, field.dtype), place.offset)
        direct = DirectValues(self.descriptor, place.offset, shape, np.dtype(field.dtype))
        if field.sample_bytes <= _SMALL_ROW_BYTES and self._is_small(field, chunks):
            rows_of_chunk = chunk_rows_for(field.shape, direct.dtype)
            return CachedValues(direct, shape[0], rows_of_chunk, chunks)
        return direct

    def _is_small(self, field: Field, chunks: ChunkCache) -> bool:
        # Labels, as a rule: a call for each costs more than to keep them all.
        num_bytes = self._manifest.num_samples * field.sample_bytes
        return not field.ragged and num_bytes <= chunks.max_bytes // 4

    def _num_rows(self, field: Field, place: Place) -> int:
        return (place.num_rows or 0) if field.ragged else self.shard.num_samples

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


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def open_hdf5(path: Path) -> h5py.File:
    """Open a file for reading whatever locks it has; HDF5 keeps no values of it in memory.

    Raises:
        OSError: it is missing, or not HDF5.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_file_locking(False, ignore_when_disabled=False)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    # Chunks are kept by us, and what is read again must come from the file.
    access.set_sieve_buf_size(0)
    access.set_cache(0, 0, 0, 0.0)
    return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, access))


class HDF5Values:
    """A dataset, filtered or of any other kind that has no plain bytes in the file."""

    def __init__(self, dataset: Any) -> None:
        """Take the open dataset ``(num_rows, *shape)``."""
        self._dataset = dataset
        self.chunk_rows = (
            int(dataset.chunks[0])
            if dataset.chunks
            else chunk_rows_for(dataset.shape[1:], dataset.dtype)
        )
        self._stored: tuple[Array, Array] | None = None

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows [start, stop), decoded."""
        return np.ascontiguousarray(self._dataset[start:stop])

    def extents(self, starts: Array, stops: Array) -> tuple[Array, Array]:
        """Return the bytes of the stored chunks that hold the rows ``[starts[i], stops[i])``."""
        if self._stored is None:
            self._stored = self._stored_chunks()
        begins, ends = self._stored
        homes = [
            np.arange(start // self.chunk_rows, -(-stop // self.chunk_rows))
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        wanted = np.unique(np.concatenate([np.empty(0, np.int64), *homes]))
        wanted = wanted[wanted < len(begins)]
        return begins[wanted], ends[wanted]

    def _stored_chunks(self) -> tuple[Array, Array]:
        num_chunks = -(-len(self._dataset) // self.chunk_rows) if self._dataset.chunks else 0
        begins, ends = np.zeros((2, num_chunks), np.int64)

        def note(chunk: Any) -> None:
            home = chunk.chunk_offset[0] // self.chunk_rows
            if home < num_chunks:  # else the file is damaged, which reading will tell
                begins[home], ends[home] = chunk.byte_offset, chunk.byte_offset + chunk.size

        if num_chunks:
            self._dataset.id.chunk_iter(note)
        return begins, ends


class Arrivals:
    """Of the blocks of one file. Several threads may use it at once."""

    def __init__(self, num_blocks: int) -> None:
        """Expect nothing yet."""
        self._is_coming = np.zeros(num_blocks, bool)
        self._awaited: dict[int, Event] = {}
        """Set when the block has come."""
        self._lock = Lock()

    def expect(self, blocks: Array) -> None:
        """Promise that ``arrived`` will be called for these blocks, whatever happens."""
        with self._lock:
            self._is_coming[blocks] = True

    def arrived(self, blocks: Array) -> None:
        """Keep the promise: somebody has tried to read these blocks."""
        with self._lock:
            self._is_coming[blocks] = False
            here = [block for block in self._awaited if not self._is_coming[block]]
            events = [self._awaited.pop(block) for block in here]
        for event in events:
            event.set()

    def wait_for(self, blocks: Array) -> None:
        """Return when none of these blocks is on its way."""
        while (coming := blocks[self._is_coming[blocks]]).size:
            # Blocks come in about this order: the last one of them is worth waking up for.
            last = int(coming[-1])
            with self._lock:
                if not self._is_coming[last]:
                    continue
                event = self._awaited.setdefault(last, Event())
            event.wait()
