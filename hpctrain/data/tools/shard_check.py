"""One shard compared with its manifest."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.core.atomic import reason_of
from hpctrain.core.checksum import crc32
from hpctrain.data.format.layout import FORMAT, Manifest
from hpctrain.data.tools.blocks import UNREADABLE, ShardBlocks, runs
from hpctrain.data.tools.faults import Fault, merged, name_blocks

Advance = Callable[[int], None]
"""Is told how many bytes were read since it was last told."""


def check_shard(directory: Path, manifest: Manifest, index: int, advance: Advance) -> list[Fault]:
    """Read all of a shard and tell what is wrong with it.

    Every byte is read once, filtered ones twice, those of a damaged shard twice.
    """
    shard = manifest.shards[index]
    try:
        blocks = ShardBlocks(directory, manifest, index)
    except OSError as error:
        advance(shard.num_bytes)
        first = sum(shard.num_samples for shard in manifest.shards[:index])
        return [
            Fault(
                file=shard.file,
                what=f"cannot be opened: {reason_of(error)}",
                shard=index,
                blocks=tuple(range(manifest.num_blocks(shard))),
                samples=((first, first + shard.num_samples),),
            )
        ]
    with blocks:
        return _ShardCheck(blocks).faults(advance)


class _ShardCheck:
    def __init__(self, blocks: ShardBlocks) -> None:
        self._blocks = blocks
        self._fault = partial(Fault, file=blocks.shard.file, shard=blocks.index)

    def faults(self, advance: Advance) -> list[Fault]:
        shard = self._blocks.shard
        is_as_written = self._blocks.file_crc32(advance) == shard.crc32
        found = self._size()
        for name, place in shard.places.items():
            # What only HDF5 can read, it may read from another file.
            if not is_as_written or place.offset is None:
                found += self._field(name)
        if not found and not is_as_written:
            found.append(
                self._fault(
                    what="is damaged outside of its samples and their checksums (the metadata of "
                    "HDF5): it has the wrong crc32, its samples are whole"
                )
            )
        return found or self._attributes()

    def _crcs(self, name: str) -> list[int | None]:
        """Return the crc32 of each block of a field, decoded; None where it cannot be read."""
        blocks = self._blocks
        crcs: list[int | None] = []
        for run in runs(blocks.bounds(name) * max(1, blocks.row_bytes(name))):
            try:
                crcs += blocks.crcs(name, run, blocks.read(name, run.start, run.stop))
            except UNREADABLE:
                crcs += [self._crc(name, block) for block in run]
        return crcs

    def _crc(self, name: str, block: int) -> int | None:
        with suppress(*UNREADABLE):
            return crc32(self._blocks.read(name, block, block + 1).data)
        return None

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
            blocks.bounds(name)
        except UNREADABLE as error:
            numbers = tuple(range(blocks.num_blocks))
            what = f"has a damaged index of field {name}: {reason_of(error)}"
            everything = (blocks.samples(0, blocks.num_blocks),)
            return [fault(what=what, blocks=numbers, samples=everything)]
        crcs = self._crcs(name)
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
        why = "have changed" if is_read[bad].any() else "cannot be read"
        return [
            fault(
                what=f"is damaged: {name_blocks(numbers)} of field {name} {why}",
                blocks=numbers,
                samples=merged(blocks.samples(block, block + 1) for block in numbers),
            )
        ]

    def _attributes(self) -> list[Fault]:
        """Compare what a whole file says of itself with the manifest."""
        want = _attributes_of(self._blocks.manifest, self._blocks.index)
        try:
            with h5py.File(self._blocks.path, "r", locking=False) as file:
                have = {name: np.asarray(file.attrs[name]).item() for name in want}
            have["fields"] = json.loads(have["fields"])
        except UNREADABLE as error:
            return [self._fault(what=f"is not a shard: {reason_of(error)}")]
        return [
            self._fault(
                what=f"says other than its manifest: {name} is {have[name]!r}, by the manifest "
                f"{value!r}"
            )
            for name, value in want.items()
            if have[name] != value
        ]


def _attributes_of(manifest: Manifest, index: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "dataset_uuid": manifest.uuid,
        "split": manifest.split,
        "shard": index,
        "n": manifest.shards[index].num_samples,
        "first_index": sum(shard.num_samples for shard in manifest.shards[:index]),
        "block_size": manifest.block_size,
        "fields": json.loads(json.dumps(manifest.fields_record())),
        "complete": 1,
    }
