"""Write one shard of a data set, an HDF5 file, and determine the offsets of its values."""

import io
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import h5py

from hpctrain import __version__
from hpctrain.core.atomic import crc32_of, sync
from hpctrain.core.checksum import crc32, crc32_combine
from hpctrain.core.units import KIB
from hpctrain.data.format.columns import Column, Rows, count
from hpctrain.data.format.dataset_manifest import FORMAT, VERSION, Manifest, Place, ShardEntry
from hpctrain.data.format.hdf5_values import own_dataset, raw_offset


class PartFile(io.FileIO):
    """A file that hides write errors from HDF5; ``check`` raises the first error.

    After an error, all further writes are dropped. The errors are hidden because HDF5 2.0 retries
    failed writes when it closes the file and when the program exits, and then crashes.
    """

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise the first error of a write, if there was one."""
        if self._error is not None:
            raise self._error

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` from the current position, with zeros after the end of the file."""
        view = memoryview(buffer).cast("B")
        count = super().readinto(view)
        view[count:] = bytes(len(view) - count)
        self.seek(len(view) - count, os.SEEK_CUR)
        return len(view)

    def write(self, data: Any) -> int:
        """Write all bytes, or store the error for ``check``."""
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
        """Change the size of the file, or store the error for ``check``."""
        size = self.tell() if size is None else size
        if self._error is None:
            try:
                super().truncate(size)
            except BaseException as error:
                self._error = error
        return size


class ShardPart:
    """An unfinished shard of at most ``capacity`` samples; ``finish`` writes its file.

    Uncompressed fields are contiguous in the file, so that a reader can map them into memory.

    ``draft`` is the manifest with the shards of this rank that were finished before.
    """

    def __init__(self, path: Path, draft: Manifest, *, capacity: int) -> None:
        self.num_samples = 0
        self._path, self._draft, self._capacity = path, draft, capacity
        self._columns: dict[str, Column] = {}
        with ExitStack() as stack:
            for name, field in draft.fields.items():
                # A file without a name disappears if the process is killed.
                spool = stack.enter_context(TemporaryFile(dir=path.parent))
                self._columns[name] = Column(name, field, spool)
            self._spools = stack.pop_all()

    @property
    def num_free(self) -> int:
        """Number of samples that still fit."""
        return self._capacity - self.num_samples

    def append(self, rows: Rows) -> None:
        """Add at most ``num_free`` samples, with the shapes and dtypes of the fields."""
        for name, samples in rows.items():
            self._columns[name].append(samples)
        self.num_samples += count(rows)

    def finish(self) -> ShardEntry:
        """Write the file, flush it to disk, and return its manifest entry."""
        with closing(PartFile(self._path, "w+b")) as storage:
            # libver must not be "latest", because HDF5 1.10 must be able to read the file. Data
            # starts at a page boundary, so that direct I/O can bypass the page cache.
            with h5py.File(
                storage,
                "w",
                libver=("earliest", "v110"),
                locking=False,
                alignment_threshold=_PAGE_BYTES,
                alignment_interval=_PAGE_BYTES,
            ) as file:
                file.attrs.update(self._attributes())
                size = self._draft.block_size
                places = {name: one.write(file, size) for name, one in self._columns.items()}
            storage.check()
        self._spools.close()
        sync(self._path)
        return ShardEntry(
            file=self._path.name,
            num_samples=self.num_samples,
            num_bytes=self._path.stat().st_size,
            crc32=crc32_of(self._path),
            places=_with_offsets(self._path, places),
        )

    def abandon(self) -> None:
        """Remove the file of the shard and all temporary files."""
        self._spools.close()
        self._path.unlink(missing_ok=True)

    def _attributes(self) -> dict[str, Any]:
        draft = self._draft
        return {
            "format": FORMAT,
            "version": VERSION,
            "dataset_uuid": draft.uuid,
            "split": draft.split,
            "shard": len(draft.shards),
            "n": self.num_samples,
            "first_index": draft.num_samples,
            "block_size": draft.block_size,
            "fields": json.dumps(draft.fields_record()),
            "created_by": f"hpctrain {__version__}, h5py {h5py.__version__}, "
            f"HDF5 {h5py.version.hdf5_version}",
            "complete": 1,
        }


def _with_offsets(path: Path, places: Mapping[str, Place]) -> dict[str, Place]:
    """Return ``places`` with the offsets of fields and tables in a finished file."""
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


_PAGE_BYTES = 4096
_HEAD_BYTES = 64 * KIB


def number(path: Path, shard: ShardEntry, *, index: int, first_index: int) -> ShardEntry:
    """Write a shard's position in the data set to the attributes of its file.

    Returns the entry of the shard with the new crc32. The attributes are in the first bytes of the
    file. The file is flushed to disk. With ISA-L, the crc32 is computed without reading the bytes
    after the attributes.
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
