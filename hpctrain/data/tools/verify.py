"""Check a data set: every byte of it is as it was written, or the report says which are not."""

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.comm.agreement import agreed, on_root
from hpctrain.core.atomic import reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import DataError
from hpctrain.data.format.hdf5_values import load_filters
from hpctrain.data.format.layout import MANIFEST, Manifest, leftovers
from hpctrain.data.tools.faults import Fault, FaultReport, merged, name_blocks
from hpctrain.data.tools.shard_blocks import UNREADABLE, ShardBlocks
from hpctrain.data.tools.shared_work import Advance, Start, followed, in_turns, or_alone

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

_MOST_THREADS = 4  # more do not read faster: a crc32 takes 7 GB each second


def verify(
    directory: Path | str,
    comm: "Communicator | None" = None,
    *,
    threads: int | None = None,
    start: Start | None = None,
) -> FaultReport:
    """Compare each byte of a data set with its manifest.

    Reads the shards only; needs memory for a few pieces of 4 MiB, or a few blocks if these are
    larger. Collective with ``comm``: the ranks share out the shards, and so do threads.

    A rank reads as many at once as it has cores, at most 4. What is wrong is the same on every
    rank; a missing or unreadable file is a fault too. Raises ``DataError``: there is no such
    directory, or zstd is needed and not installed; on every rank.
    """
    directory, comm = Path(directory), or_alone(comm)
    manifest, stray = on_root(comm, partial(_manifest, directory), DataError)
    if isinstance(manifest, Fault):
        return FaultReport(directory=str(directory), faults=(manifest,), leftovers=stray)
    with agreed(comm, DataError):
        load_filters(manifest.fields)
    threads = threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
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
    """Check that there is a directory; a DataError if there is none, or it cannot be seen."""
    try:
        mode = directory.stat().st_mode
    except OSError as error:
        raise DataError(
            f"cannot see the data set {directory}: {reason_of(error)}; check path and mount"
        ) from error
    if not stat.S_ISDIR(mode):
        raise DataError(f"a data set is a directory, {directory} is none; give its path")


def _manifest(directory: Path) -> tuple[Manifest | Fault, tuple[str, ...]]:
    """Return the manifest, or what is wrong with it, and the leftovers beside it."""
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
    with ThreadPoolExecutor(threads) as pool:

        def check() -> Iterator[None]:
            one = partial(check_shard, directory, manifest, advance=advance)
            for found in pool.map(one, mine):
                faults.extend(found)
                yield

        in_turns(comm, check())
    together = [fault for found in comm.allgather_object(faults) for fault in found]
    return tuple(sorted(together, key=lambda fault: fault.shard or 0))


def check_shard(directory: Path, manifest: Manifest, index: int, advance: Advance) -> list[Fault]:
    """Read all of a shard, once, and once more if it is damaged; tell what is wrong with it."""
    shard = manifest.shards[index]
    try:
        blocks = ShardBlocks(directory, manifest, index)
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
        return _ShardCheck(blocks).faults(advance)
    finally:
        blocks.close_hdf5()


class _ShardCheck:
    def __init__(self, blocks: ShardBlocks) -> None:
        self._blocks = blocks
        self._fault = partial(Fault, file=blocks.shard.file, shard=blocks.number)

    def faults(self, advance: Advance) -> list[Fault]:
        shard = self._blocks.shard
        is_as_written = self._blocks.file_crc32(advance) == shard.crc32
        found = self._size()
        for name in shard.places:
            if not is_as_written or not self._blocks.holds(name):
                found += self._field(name)
        if not found and not is_as_written:
            found.append(
                self._fault(
                    what="is damaged outside of its samples and their checksums (the metadata of "
                    "HDF5): it has the wrong crc32, its samples are whole"
                )
            )
        return found

    def _size(self) -> list[Fault]:
        have, want = self._blocks.num_bytes, self._blocks.shard.num_bytes
        if have == want:
            return []
        how = "was cut off" if have < want else "has grown"
        return [self._fault(what=f"{how}: it has {have} bytes, by its manifest {want}")]

    def _field(self, name: str) -> list[Fault]:
        """Compare the blocks of a field with their checksums, and these with the manifest."""
        blocks = self._blocks
        fault = partial(self._fault, field=name)
        try:
            bounds = blocks.bounds(name)
        except UNREADABLE as error:
            numbers = tuple(range(blocks.num_blocks))
            what = f"has a damaged index of field {name}: {reason_of(error)}"
            everything = (blocks.samples(0, blocks.num_blocks),)
            return [fault(what=what, blocks=numbers, samples=everything)]
        crcs = blocks.crcs(name, bounds)
        found = np.array([crc or 0 for crc in crcs], "<u4")
        is_read = np.array([crc is not None for crc in crcs])
        try:
            table = blocks.table(name)
        except UNREADABLE:
            table = None
        if is_read.all() and crc32(found.data) == blocks.shard.places[name].crc32:
            if table is not None and np.array_equal(table, found):
                return []
            return [fault(what=f"has damaged checksums of field {name}; its samples are whole")]
        bad = ~is_read if table is None else ~is_read | (found != table)
        if not bad.any():
            bad = np.ones_like(bad)  # a shard in itself, but of another data set
        numbers = tuple(np.flatnonzero(bad).tolist())
        has = "has" if len(numbers) == 1 else "have"
        why = f"{has} changed" if is_read[bad].any() else "cannot be read"
        return [
            fault(
                what=f"is damaged: {name_blocks(numbers)} of field {name} {why}",
                blocks=numbers,
                samples=merged(blocks.samples(block, block + 1) for block in numbers),
            )
        ]
