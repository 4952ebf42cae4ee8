"""One HDF5 shard while it is written, and where its bytes lie afterwards."""

import io
import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain import __version__
from hpctrain.core.atomic import PART, crc32_of, sync
from hpctrain.core.checksum import crc32, crc32_combine
from hpctrain.core.units import KIB
from hpctrain.data.format.columns import RaggedRows, Rows, count, new_column
from hpctrain.data.format.dataset_manifest import FORMAT, VERSION, Manifest, Place, ShardEntry
from hpctrain.data.format.hdf5_values import own_dataset, raw_offset


class PartFile(io.FileIO):
    """A file that takes every byte; after a refusal it keeps none, and ``check`` raises it.

    HDF5 keeps data that it could not write, tries again when it closes and when the program ends,
    and crashes there (seen with 2.0). So it never learns of a refusal.
    """

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise what the system, or a signal, has said since the file was opened."""
        if self._error is not None:
            raise self._error

    def readinto(self, buffer: Any) -> int:
        """Read; zeros where nothing was written."""
        view = memoryview(buffer).cast("B")
        count = super().readinto(view)
        view[count:] = bytes(len(view) - count)
        self.seek(len(view) - count, os.SEEK_CUR)
        return len(view)

    def write(self, data: Any) -> int:
        """Write all of it, or keep the reason for ``check``."""
        view = memoryview(data).cast("B")
        start, done = self.tell(), 0
        if self._error is None:
            try:
                while done < len(view):
                    done += os.pwrite(self.fileno(), view[done:], start + done)
            except BaseException as error:
                self._error = error
        self.seek(start + len(view))
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size, or keep the reason for ``check``."""
        size = self.tell() if size is None else size
        if self._error is None:
            try:
                super().truncate(size)
            except BaseException as error:
                self._error = error
        return size


class ShardPart:
    """A shard that grows to at most ``capacity`` samples.

    Fields whose samples have one shape are contiguous, so that a reader can map them. Such a
    field has its full size from the start, hence a shard that was not filled is copied at the end.
    """

    def __init__(self, path: Path, draft: Manifest, *, capacity: int) -> None:
        """Create the file; ``draft`` has the shards before it."""
        self.path = path
        self.num_samples = 0
        self._draft = draft
        self._capacity = capacity
        self._crcs = {name: BlockCrcs(draft.block_size) for name in draft.fields}
        self._lengths: dict[str, list[NDArray[np.int64]]] = {
            name: [] for name, field in draft.fields.items() if field.ragged
        }
        self._columns = {
            name: new_column(path, name, field, draft.block_size, capacity)
            for name, field in draft.fields.items()
        }
        self._file = self._create()
        self._storage.check()

    @property
    def num_free(self) -> int:
        """Samples that still fit."""
        return self._capacity - self.num_samples

    def append(self, rows: Rows) -> None:
        """Add at most ``num_free`` samples, with the shapes and dtypes of the fields."""
        for name, some in rows.items():
            self._crcs[name].extend(some)
            if isinstance(some, RaggedRows):
                self._lengths[name].append(np.diff(some.offsets))
            self._columns[name].append(_values_of(some))
        self.num_samples += count(rows)
        self._storage.check()

    def finish(self) -> ShardEntry:
        """Complete the file, put it on disk and return its description."""
        if self.num_free and any(column.capacity for column in self._columns.values()):
            self._shorten()
        for column in self._columns.values():
            column.finish()
        places = {name: self._finish_tables(name) for name in self._columns}
        self._file.attrs.modify("n", self.num_samples)
        self._file.attrs.modify("complete", 1)
        self._close()
        self._storage.check()
        sync(self.path)
        return ShardEntry(
            file=self.path.name,
            num_samples=self.num_samples,
            num_bytes=self.path.stat().st_size,
            crc32=crc32_of(self.path),
            places=with_offsets(self.path, places),
        )

    def abandon(self) -> None:
        """Close and remove the file."""
        self._close()
        self.path.unlink(missing_ok=True)

    def _create(self) -> h5py.File:
        # HDF5 1.10 must read the file, so never libver="latest"; on a page boundary, direct
        # reads that bypass the page cache are possible.
        self._storage = PartFile(self.path, "w+b")
        file = h5py.File(
            self._storage,
            "w",
            libver=("earliest", "v110"),
            locking=False,
            alignment_threshold=_PAGE_BYTES,
            alignment_interval=_PAGE_BYTES,
        )
        draft = self._draft
        file.attrs.update(
            format=FORMAT,
            version=VERSION,
            dataset_uuid=draft.uuid,
            split=draft.split,
            shard=len(draft.shards),
            n=0,
            first_index=draft.num_samples,
            block_size=draft.block_size,
            fields=json.dumps(draft.fields_record()),
            created_by=f"hpctrain {__version__}, h5py {h5py.__version__}, "
            f"HDF5 {h5py.version.hdf5_version}",
            complete=0,
        )
        for column in self._columns.values():
            column.move(file)
        return file

    def _shorten(self) -> None:
        """Copy all values to a file of just that size."""
        old, old_storage, old_path = self._file, self._storage, self.path
        self.path = old_path.with_suffix(f".short{PART}")
        self._file = self._create()
        old.close()
        old_storage.close()
        old_path.unlink()

    def _close(self) -> None:
        self._file.close()
        self._storage.close()

    def _finish_tables(self, name: str) -> Place:
        crcs = self._crcs[name].table
        self._file.create_dataset(f"crc/{name}", data=crcs)
        place = Place(offset=None, crc_offset=None, crc32=crc32(crcs.data))
        if name not in self._lengths:
            return place
        none = np.zeros(1, np.int64)
        index = np.cumsum(np.concatenate([none, *self._lengths[name]])).astype("<u8")
        self._file.create_dataset(f"index/{name}", data=index)
        return replace(place, index_crc32=crc32(index.data), num_rows=int(index[-1]))


def with_offsets(path: Path, places: Mapping[str, Place]) -> dict[str, Place]:
    """Return the places of fields and their tables in a finished file."""
    num_bytes = path.stat().st_size
    with h5py.File(path, "r", locking=False) as file:

        def offset(table: str) -> int | None:
            return raw_offset(own_dataset(file, table), num_bytes) if table in file else None

        return {
            name: replace(
                place,
                offset=offset(f"data/{name}"),
                crc_offset=offset(f"crc/{name}"),
                index_offset=offset(f"index/{name}"),
            )
            for name, place in places.items()
        }


def _values_of(rows: NDArray[Any] | RaggedRows) -> NDArray[Any]:
    return rows.used if isinstance(rows, RaggedRows) else rows


class BlockCrcs:
    """Checksums of one field of a shard."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_samples = 0
        self._crcs: list[int] = []

    def extend(self, rows: NDArray[Any] | RaggedRows) -> None:
        """Add samples."""
        done = 0
        while done < len(rows):
            inside = self._num_samples % self._block_size
            if not inside:
                self._crcs.append(0)
            piece = rows[done : min(len(rows), done + self._block_size - inside)]
            data = np.ascontiguousarray(_values_of(piece)).data
            self._crcs[-1] = crc32(data, self._crcs[-1])
            self._num_samples += len(piece)
            done += len(piece)

    @property
    def table(self) -> NDArray[np.uint32]:
        """Return ``(num_blocks,)``, as ``/crc/<field>`` has it."""
        return np.array(self._crcs, "<u4")


_PAGE_BYTES = 4096
_HEAD_BYTES = 64 * KIB


def number(path: Path, shard: ShardEntry, *, index: int, first_index: int) -> ShardEntry:
    """Write the place of a shard into its attributes, which are in its first bytes.

    The file is on disk when this returns the shard with its new crc32, for which the bytes behind
    the attributes are not read where ISA-L is here.
    """
    before = _head(path)
    with closing(PartFile(path, "r+b")) as storage:
        with h5py.File(storage, "r+", libver=("earliest", "v110"), locking=False) as file:
            file.attrs.modify("shard", index)
            file.attrs.modify("first_index", first_index)
        storage.check()
    sync(path)
    if crc32_combine is None:
        return replace(shard, crc32=crc32_of(path))
    rest_bytes = shard.num_bytes - len(before)
    rest = shard.crc32 ^ crc32_combine(crc32(before), 0, rest_bytes)
    return replace(shard, crc32=crc32_combine(crc32(_head(path)), rest, rest_bytes))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)
