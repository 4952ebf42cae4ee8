"""One shard compared with its manifest: every byte is read once, filtered ones twice."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.core.atomic import reason_of
from hpctrain.core.checksum import crc32
from hpctrain.data.format.crc import combine
from hpctrain.data.format.layout import FORMAT, Manifest
from hpctrain.data.tools.faults import Fault, merged, name_blocks
from hpctrain.data.tools.pieces import SavedPiece, block_crc, cut, read_piece
from hpctrain.data.tools.salvage import UNREADABLE, ShardBlocks, runs

Advance = Callable[[int], None]
"""Is told how many bytes were read since it was last told."""


def inspect(
    directory: Path, manifest: Manifest, index: int, *, threads: int, advance: Advance
) -> list[Fault]:
    """Read all of a shard and tell what is wrong with it.

    Args:
        directory: of the data set.
        manifest: of the data set.
        index: number of the shard.
        threads: that read at once.
        advance: told of the progress, by any thread.
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
    with blocks, ThreadPoolExecutor(threads) as pool:
        return _Inspection(blocks, pool, advance).faults()


class _Inspection:
    def __init__(self, blocks: ShardBlocks, pool: ThreadPoolExecutor, advance: Advance) -> None:
        self._blocks = blocks
        self._pool = pool
        self._advance = advance
        self._fault = partial(Fault, file=blocks.shard.file, shard=blocks.index)

    def faults(self) -> list[Fault]:
        blocks, shard = self._blocks, self._blocks.shard
        pieces = list(cut(blocks))
        crcs, file_crc = self._read(pieces)
        found = self._size()
        for name in blocks.manifest.fields:
            found += self._field(name, crcs.get(name))
        if not found and file_crc != shard.crc32:
            found.append(
                self._fault(
                    what="is damaged outside of its samples and their checksums (the metadata of "
                    "HDF5): it has the wrong crc32, its samples are whole"
                )
            )
        return found or self._attributes()

    def _read(self, pieces: list[SavedPiece]) -> tuple[dict[str, list[int | None]], int | None]:
        """Return the crc32 of each block of the fields in plain bytes, and of the file."""
        work = partial(read_piece, self._blocks, threading.local())
        # A thread costs more than a small file.
        reads = self._pool.map(work, pieces) if len(pieces) > 8 else map(work, pieces)
        whole: int | None = 0
        crcs: dict[str, list[int | None]] = {}
        for piece, read in zip(pieces, reads, strict=True):
            if piece.field is not None:
                crcs.setdefault(piece.field, []).extend(read.block_crcs)
            if whole is not None and read.crc32 is not None:
                whole = combine(whole, read.crc32, piece.stop - piece.start)
            else:
                whole = None
            self._advance(piece.stop - piece.start)
        return crcs, whole

    def _size(self) -> list[Fault]:
        have, want = self._blocks.num_bytes, self._blocks.shard.num_bytes
        if have == want:
            return []
        how = "was cut off" if have < want else "has grown"
        return [self._fault(what=f"{how}: it has {have} bytes, by its manifest {want}")]

    def _field(self, name: str, crcs: list[int | None] | None) -> list[Fault]:
        """Compare the blocks of a field with their checksums, and these with the manifest."""
        blocks = self._blocks
        fault = partial(self._fault, field=name)
        everything = (blocks.samples(0, blocks.num_blocks),)
        try:
            blocks.bounds(name)
        except UNREADABLE as error:
            numbers = tuple(range(blocks.num_blocks))
            what = f"has a damaged index of field {name}: {reason_of(error)}"
            return [fault(what=what, blocks=numbers, samples=everything)]
        if crcs is None:
            crcs = _decoded_crcs(blocks, name)
        found = np.array([crc or 0 for crc in crcs], "<u4")
        is_read = np.array([crc is not None for crc in crcs])
        try:
            table = blocks.table(name)
        except UNREADABLE:
            table = None
        want = blocks.shard.places[name].crc32
        if is_read.all() and crc32(found.data) == want:
            if table is not None and np.array_equal(table, found):
                return []
            return [fault(what=f"has damaged checksums of field {name}; its samples are whole")]
        bad = ~is_read if table is None else ~is_read | (found != table)
        if not bad.any():
            bad = np.ones_like(bad)  # a shard in itself, but of another data set
        numbers = tuple(np.flatnonzero(bad).tolist())
        why = "cannot be read" if not is_read[bad].any() else "have changed"
        return [
            fault(
                what=f"is damaged: {name_blocks(numbers)} of field {name} {why}",
                blocks=numbers,
                samples=merged(blocks.samples(block, block + 1) for block in numbers),
            )
        ]

    def _attributes(self) -> list[Fault]:
        """Compare what a whole file says of itself with the manifest."""
        want = attributes_of(self._blocks.manifest, self._blocks.index)
        try:
            with h5py.File(self._blocks.path, "r", locking=False) as file:
                have = {name: np.asarray(file.attrs[name]).item() for name in want}
            have["fields"] = json.loads(have["fields"])
        except UNREADABLE as error:
            return [self._fault(what=f"is not a shard: {reason_of(error)}")]
        wrong = [
            f"{name} is {have[name]!r}, by the manifest {value!r}"
            for name, value in want.items()
            if have[name] != value
        ]
        return [self._fault(what=f"says other than its manifest: {text}") for text in wrong]


def attributes_of(manifest: Manifest, index: int) -> dict[str, Any]:
    """Return the attributes that a shard has by its manifest."""
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


def _decoded_crcs(blocks: ShardBlocks, name: str) -> list[int | None]:
    """Return the crc32 of each block of a field that only HDF5 can read."""
    row_bytes = max(1, blocks.row_bytes(name))
    crcs: list[int | None] = []
    for run in runs(blocks.bounds(name) * row_bytes):
        try:
            rows = blocks.read(name, run.start, run.stop)
        except UNREADABLE:
            crcs += [block_crc(blocks, name, block) for block in run]
            continue
        edges = blocks.bounds(name)[run.start : run.stop + 1]
        cuts = (edges - edges[0]).tolist()
        crcs += [crc32(rows[a:b].data) for a, b in pairwise(cuts)]
    return crcs
