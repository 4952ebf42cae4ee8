"""One shard compared with its manifest; every byte is read once, filtered ones twice."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.core.atomic import reason_of
from hpctrain.core.checksum import crc32
from hpctrain.data.format.layout import FORMAT, Manifest
from hpctrain.data.tools.blocks import PIECE_BYTES, UNREADABLE, ShardBlocks, runs
from hpctrain.data.tools.faults import Fault, merged, name_blocks

Advance = Callable[[int], None]
"""Is told how many bytes were read since it was last told."""


def check_shard(directory: Path, manifest: Manifest, index: int, advance: Advance) -> list[Fault]:
    """Read all of a shard and tell what is wrong with it.

    Args:
        directory: of the data set.
        manifest: of the data set.
        index: number of the shard.
        advance: told of the progress.
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
        return _ShardCheck(blocks, advance).faults()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a file that are read at once: some blocks of a field, or what lies between."""

    start: int
    stop: int
    field: str = ""
    blocks: range = range(0)


class _ShardCheck:
    def __init__(self, blocks: ShardBlocks, advance: Advance) -> None:
        self._blocks = blocks
        self._advance = advance
        self._fault = partial(Fault, file=blocks.shard.file, shard=blocks.index)

    def faults(self) -> list[Fault]:
        crcs, file_crc = self._read()
        found = self._size()
        for name in self._blocks.manifest.fields:
            found += self._field(name, crcs.get(name))
        if not found and file_crc != self._blocks.shard.crc32:
            found.append(
                self._fault(
                    what="is damaged outside of its samples and their checksums (the metadata of "
                    "HDF5): it has the wrong crc32, its samples are whole"
                )
            )
        return found or self._attributes()

    def _read(self) -> tuple[dict[str, list[int | None]], int | None]:
        """Return the crc32 of each block of the fields in plain bytes, and of the file."""
        whole: int | None = 0
        crcs: dict[str, list[int | None]] = {}
        buffer = bytearray()
        for piece in _cut(self._blocks):
            num_bytes = piece.stop - piece.start
            if len(buffer) < num_bytes:
                buffer = bytearray(num_bytes)
            data = memoryview(buffer)[:num_bytes]
            block_crcs = crcs.setdefault(piece.field, [])
            try:
                self._blocks.read_into(data, piece.start)
            except OSError:
                whole = None
                block_crcs += [self._block_crc(piece.field, block) for block in piece.blocks]
            else:
                whole = None if whole is None else crc32(data, whole)
                block_crcs += self._block_crcs(piece, data)
            self._advance(num_bytes)
        return crcs, whole

    def _block_crcs(self, piece: _Piece, data: memoryview) -> list[int]:
        if not piece.blocks:
            return []
        edges = self._blocks.bounds(piece.field)[piece.blocks.start : piece.blocks.stop + 1]
        cuts = ((edges - edges[0]) * self._blocks.row_bytes(piece.field)).tolist()
        return [crc32(data[start:stop]) for start, stop in pairwise(cuts)]

    def _block_crc(self, name: str, block: int) -> int | None:
        """Return the crc32 of the decoded bytes of a block; None where it cannot be read."""
        try:
            return crc32(self._blocks.read(name, block, block + 1).data)
        except UNREADABLE:
            return None

    def _decoded_crcs(self, name: str) -> list[int | None]:
        """Return the crc32 of each block of a field that only HDF5 can read."""
        blocks = self._blocks
        crcs: list[int | None] = []
        for run in runs(blocks.bounds(name) * max(1, blocks.row_bytes(name))):
            try:
                rows = blocks.read(name, run.start, run.stop)
            except UNREADABLE:
                crcs += [self._block_crc(name, block) for block in run]
                continue
            edges = blocks.bounds(name)[run.start : run.stop + 1]
            crcs += [crc32(rows[a:b].data) for a, b in pairwise((edges - edges[0]).tolist())]
        return crcs

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
        try:
            blocks.bounds(name)
        except UNREADABLE as error:
            numbers = tuple(range(blocks.num_blocks))
            what = f"has a damaged index of field {name}: {reason_of(error)}"
            everything = (blocks.samples(0, blocks.num_blocks),)
            return [fault(what=what, blocks=numbers, samples=everything)]
        crcs = self._decoded_crcs(name) if crcs is None else crcs
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


def _cut(blocks: ShardBlocks) -> Iterator[_Piece]:
    """Cut a file into pieces, in the order of its bytes, so that no block is in two of them."""
    regions = []
    for name in blocks.manifest.fields:
        offset = blocks.shard.places[name].offset
        if offset is not None:
            try:
                edges = offset + blocks.bounds(name) * blocks.row_bytes(name)
            except UNREADABLE:
                continue  # without an index, bytes like others
            if edges[0] < edges[-1]:
                regions.append((edges, name))
    position = 0
    for edges, name in sorted(regions, key=lambda region: int(region[0][0])):
        yield from _gap(position, int(edges[0]))
        for run in runs(edges):
            yield _Piece(int(edges[run.start]), int(edges[run.stop]), name, run)
        position = int(edges[-1])
    yield from _gap(position, blocks.num_bytes)


def _gap(start: int, stop: int) -> Iterator[_Piece]:
    for first in range(start, stop, PIECE_BYTES):
        yield _Piece(first, min(first + PIECE_BYTES, stop))
