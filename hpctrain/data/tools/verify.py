"""Verify a data set: compare every byte with the checksums of the manifest."""

import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.comm.agreement import agreed, on_root
from hpctrain.core.atomic import reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB, format_bytes, format_numbers
from hpctrain.data.format.dataset_manifest import (
    MANIFEST,
    Manifest,
    Range,
    leftovers,
    merged_ranges,
)
from hpctrain.data.format.hdf5_values import UNREADABLE, load_filters
from hpctrain.data.io.shardfile import RawShard
from hpctrain.data.io.values import Array, ChunkCache, read_into
from hpctrain.data.tools.rank_work import Advance, Start, followed, in_turns, or_alone

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

PIECE_BYTES = 4 * MIB  # bytes of a file per read
_MAX_THREADS = 4  # more threads do not read faster, as one thread computes crc32 at 7 GB/s
_UNREADABLE = (*UNREADABLE, DataError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Fault of one file of a data set, and the samples that it affects."""

    file: str
    what: str  # description of the fault, such as "has grown"; the file is the subject
    shard: int | None = None  # index of the shard, None for the manifest
    field: str | None = None  # the field; None for a fault of the whole file
    blocks: tuple[int, ...] = ()  # damaged blocks, counted from the start of the shard
    samples: tuple[Range, ...] = ()
    """Lost samples, in ascending order; empty if only other bytes are damaged."""

    def __str__(self) -> str:
        lost = ", ".join(f"{start}-{stop - 1}" for start, stop in self.samples)
        return f"{self.file} {self.what}" + (f" (samples {lost})" if lost else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultReport:
    """Result of ``verify``: faults and leftovers of a data set."""

    directory: str
    uuid: str | None = None  # None if the manifest cannot be read
    num_shards: int = 0
    num_samples: int = 0
    num_bytes: int = 0
    faults: tuple[Fault, ...] = ()  # by shard, then by field; the same on every rank
    leftovers: tuple[str, ...] = ()
    """Files that killed writers or replaced data sets left; they are not faults."""

    @property
    def is_whole(self) -> bool:
        """Whether no file has a fault."""
        return not self.faults

    @property
    def lost(self) -> tuple[Range, ...]:
        """Ranges of lost samples, merged, in ascending order."""
        return merged_ranges(samples for fault in self.faults for samples in fault.samples)

    @property
    def num_lost(self) -> int:
        """Number of lost samples."""
        return sum(stop - start for start, stop in self.lost)

    @property
    def bad_shards(self) -> tuple[int, ...]:
        """Indices of the shards with a fault."""
        return tuple(sorted({f.shard for f in self.faults if f.shard is not None}))

    def lines(self) -> list[str]:
        """Return the human-readable report."""
        lines = [f"fault: {fault}" for fault in self.faults]
        lines += [f"leftover: {name}" for name in self.leftovers]
        if self.leftovers and self.uuid is None:
            lines.append(
                "leftovers are files of a command that was stopped; run the same command again, "
                "which continues with these files or replaces them"
            )
        elif self.leftovers:
            lines.append(
                f"leftovers have no effect; hpctrain data repair {self.directory} removes them"
            )
        if self.is_whole:
            return [*lines, f"intact: {self._size()}"]
        if self.uuid is None:
            repair = f"hpctrain data repair {self.directory} --from COPY"
            return [*lines, f"damaged: restore the manifest from another copy: {repair}"]
        lost = (
            f"damaged: {self.num_lost} of {self.num_samples} samples cannot be read, "
            f"{len(self.bad_shards)} of {self.num_shards} shards are damaged"
        )
        remedy = (
            f"restore the shards from another copy: hpctrain data repair {self.directory} "
            f"--from COPY; without a copy, pack the source again, or skip the lost samples in "
            f'training: on_corrupt="skip"'
        )
        return [*lines, lost, remedy]

    def _size(self) -> str:
        return (
            f"{self.num_samples} samples in {self.num_shards} "
            f"shard{'s' * (self.num_shards != 1)}, {format_bytes(self.num_bytes)}"
        )


def verify(
    directory: Path | str,
    comm: "Communicator | None" = None,
    *,
    threads: int | None = None,
    start: Start | None = None,
) -> FaultReport:
    """Compare each byte of a data set with its manifest.

    Changes no file. Needs memory for a few pieces of 4 MiB, or for a few blocks if blocks are
    larger. Collective with ``comm``, whose ranks divide the shards among themselves.

    A rank reads ``threads`` shards concurrently; by default one per core, but at most 4. The
    report is the same on every rank; a missing or unreadable file is a fault too. Raises
    ``DataError`` on every rank: there is no such directory, or zstd is needed but not installed.
    """
    directory, comm = Path(directory), or_alone(comm)
    manifest, stray = on_root(comm, partial(_manifest, directory), DataError)
    if isinstance(manifest, Fault):
        return FaultReport(directory=str(directory), faults=(manifest,), leftovers=stray)
    with agreed(comm, DataError):
        load_filters(manifest.fields)
    threads = threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    faults = _share(directory, manifest, comm, threads, start)
    return FaultReport(
        directory=str(directory),
        uuid=manifest.uuid,
        num_shards=len(manifest.shards),
        num_samples=manifest.num_samples,
        num_bytes=manifest.num_bytes,
        faults=faults,
        leftovers=stray,
    )


def check_directory(directory: Path) -> None:
    """Raise ``DataError`` unless ``directory`` is an accessible directory."""
    try:
        mode = directory.stat().st_mode
    except OSError as error:
        raise DataError(
            f"cannot see the data set {directory}: {reason_of(error)}; check the path and the "
            f"mount"
        ) from error
    if not stat.S_ISDIR(mode):
        raise DataError(
            f"a data set must be a directory, but {directory} is a file; pass the directory that "
            f"contains it"
        )


def _manifest(directory: Path) -> tuple[Manifest | Fault, tuple[str, ...]]:
    """Return the manifest, or its fault, and the leftovers in the directory."""
    check_directory(directory)
    try:
        manifest = Manifest.read(directory)
    except DataError as error:
        fault = Fault(file=MANIFEST, what=f"cannot be used: {error}")
        return fault, leftovers(directory, None)
    return manifest, leftovers(directory, manifest)


def _share(
    directory: Path, manifest: Manifest, comm: "Communicator", threads: int, start: Start | None
) -> tuple[Fault, ...]:
    mine = range(comm.rank, len(manifest.shards), comm.size)
    advance = followed(start, sum(manifest.shards[index].num_bytes for index in mine))
    faults: list[Fault] = []
    check = partial(_check_shard, directory, manifest, advance=advance)
    with ThreadPoolExecutor(threads) as pool:
        in_turns(comm, pool.map(check, mine), faults.extend)
    together = [fault for found in comm.allgather_object(faults) for fault in found]
    return tuple(sorted(together, key=lambda fault: fault.shard or 0))


def _check_shard(directory: Path, manifest: Manifest, index: int, advance: Advance) -> list[Fault]:
    """Read a whole shard, twice if it is damaged, and return its faults."""
    shard = manifest.shards[index]
    try:
        check = _ShardCheck(directory, manifest, index)
    except OSError as error:
        advance(shard.num_bytes)
        return [
            Fault(
                file=shard.file,
                what=f"cannot be opened: {reason_of(error)}",
                shard=index,
                blocks=tuple(range(manifest.num_blocks(shard))),
                samples=(manifest.samples_of(index),),
            )
        ]
    try:
        return check.faults(advance)
    finally:
        check.close_hdf5()


class _ShardCheck(RawShard):
    """Checker of the blocks of one shard, whose file may be damaged.

    The checker differs from ``ShardFile``, the reader of training, in three points. The file is
    not mapped, because a read error in a map ends the process. Nothing is checked when the file is
    opened, because the undamaged samples of a damaged file must be found. HDF5 is called only for
    values without an offset in the manifest, because damaged metadata can contain any address.
    """

    def __init__(self, directory: Path, manifest: Manifest, index: int) -> None:
        super().__init__(directory / manifest.shards[index].file, manifest, index)
        self._num_blocks = manifest.num_blocks(self.shard)
        self._first_sample = manifest.samples_of(index)[0]
        self._fault = partial(Fault, file=self.shard.file, shard=index)

    def faults(self, advance: Advance) -> list[Fault]:
        """Return the faults of the shard; ``advance`` gets the number of bytes that were read."""
        shard, num_bytes = self.shard, os.fstat(self.descriptor).st_size
        is_as_written = self._file_crc32(num_bytes, advance) == shard.crc32
        found = []
        if num_bytes != shard.num_bytes:
            how = "was cut off" if num_bytes < shard.num_bytes else "has grown"
            what = f"{how}: it has {num_bytes} bytes, but {shard.num_bytes} in the manifest"
            found.append(self._fault(what=what))
        for name in shard.places:
            if not is_as_written or not self._has_values(name):
                found += self._field(name)
        if not found and not is_as_written:
            found.append(
                self._fault(
                    what=(
                        "has the wrong crc32, but its samples and their checksums are intact: "
                        "metadata of HDF5 are damaged"
                    )
                )
            )
        return found

    def _file_crc32(self, num_bytes: int, advance: Advance) -> int | None:
        """Return the crc32 of all bytes of the file; None if some cannot be read."""
        crc: int | None = 0
        buffer = memoryview(bytearray(min(PIECE_BYTES, num_bytes)))
        for start in range(0, num_bytes, PIECE_BYTES):
            piece = buffer[: num_bytes - start]
            try:
                read_into(self.descriptor, piece, start)
            except OSError:
                crc = None
            else:
                crc = None if crc is None else crc32(piece, crc)
            advance(len(piece))
        return crc

    def _has_values(self, name: str) -> bool:
        """Return whether this file stores the values; HDF5 links may point to other files."""
        with suppress(*_UNREADABLE):
            self.values_of(name, ChunkCache(0))
            return True
        return False

    def _field(self, name: str) -> list[Fault]:
        """Compare blocks of a field with their checksums, and the checksums with the manifest."""
        fault = partial(self._fault, field=name)
        firsts = np.arange(self._num_blocks + 1) * self._manifest.block_size
        bounds = np.minimum(firsts, self.shard.num_samples)
        try:
            if self._manifest.fields[name].ragged:
                bounds = self.index(name)[bounds]
        except _UNREADABLE as error:
            numbers = tuple(range(self._num_blocks))
            what = f"has a damaged index of field {name}: {reason_of(error)}"
            return [fault(what=what, blocks=numbers, samples=self._samples(numbers))]
        crcs = self._crcs(name, bounds)
        found = np.array([crc or 0 for crc in crcs], "<u4")
        is_read = np.array([crc is not None for crc in crcs])
        try:
            table = self.table(name)
        except _UNREADABLE:
            table = None
        if is_read.all() and crc32(found.data) == self.shard.places[name].crc32:
            if table is not None and np.array_equal(table, found):
                return []
            return [fault(what=f"has damaged checksums of field {name}; its samples are intact")]
        bad = ~is_read if table is None else ~is_read | (found != table)
        if not bad.any():
            bad = np.ones_like(bad)  # the shard is intact, but belongs to another data set
        numbers = tuple(np.flatnonzero(bad).tolist())
        blocks = f"block{'s' * (len(numbers) != 1)} {format_numbers(numbers)} of field {name}"
        has = "has" if len(numbers) == 1 else "have"
        why = f"{has} changed" if is_read[bad].any() else "cannot be read"
        what = f"is damaged: {blocks} {why}"
        return [fault(what=what, blocks=numbers, samples=self._samples(numbers))]

    def _crcs(self, name: str, bounds: Array) -> list[int | None]:
        """Return the crc32 of each decoded block of a field; None if a block cannot be read."""
        found: list[int | None] = [None] * self._num_blocks
        with suppress(*_UNREADABLE):
            values = self.values_of(name, ChunkCache(0))  # caches only the last chunk
            for block in range(self._num_blocks):
                start, stop = int(bounds[block]), int(bounds[block + 1])
                with suppress(*_UNREADABLE):
                    rows = values.between(start, stop) if start < stop else np.empty(0, "u1")
                    found[block] = crc32(np.ascontiguousarray(rows).data)
        return found

    def _samples(self, blocks: Iterable[int]) -> tuple[Range, ...]:
        """Return the ranges, in the data set, of the samples in these blocks of the shard."""
        size, first, count = self._manifest.block_size, self._first_sample, self.shard.num_samples
        return merged_ranges(
            (first + block * size, first + min((block + 1) * size, count)) for block in blocks
        )
