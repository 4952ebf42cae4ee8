"""A file cut into pieces for its checksums: that of the file, and those of plain blocks."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

from hpctrain.core.checksum import crc32
from hpctrain.core.units import KIB
from hpctrain.data.format.crc import combine
from hpctrain.data.tools.salvage import PIECE_BYTES, UNREADABLE, ShardBlocks, runs

_WORTH_COMBINING = 64 * KIB
"""Bytes of a block from which on combining takes less time than reading it once more."""


@dataclass(frozen=True, slots=True)
class SavedPiece:
    """Bytes of a file that are read at once: some blocks of a field, or what lies between."""

    start: int
    stop: int
    field: str | None = None
    blocks: range = range(0)


@dataclass(frozen=True, slots=True)
class Read:
    """What was read of a piece."""

    crc32: int | None
    """Of its bytes; None where they cannot be read."""
    block_crcs: list[int | None]


def read_piece(blocks: ShardBlocks, local: threading.local, piece: SavedPiece) -> Read:
    """Read a piece once.

    Args:
        blocks: of the file.
        local: keeps a buffer for each thread: fresh memory costs more than the reading.
        piece: of ``cut``.
    """
    num_bytes = piece.stop - piece.start
    if len(getattr(local, "buffer", b"")) < num_bytes:
        local.buffer = bytearray(num_bytes)
    data = memoryview(local.buffer)[:num_bytes]
    try:
        blocks.read_into(data, piece.start)
    except OSError:
        if len(piece.blocks) == 1 or piece.field is None:
            return Read(None, [None] * len(piece.blocks))
        return Read(None, [block_crc(blocks, piece.field, block) for block in piece.blocks])
    if piece.field is None:
        return Read(crc32(data), [])
    edges = blocks.bounds(piece.field)[piece.blocks.start : piece.blocks.stop + 1]
    cuts = ((edges - edges[0]) * blocks.row_bytes(piece.field)).tolist()
    crcs = [crc32(data[start:stop]) for start, stop in pairwise(cuts)]
    if num_bytes < _WORTH_COMBINING * len(crcs):
        return Read(crc32(data), [*crcs])
    sized = zip(crcs, (stop - start for start, stop in pairwise(cuts)), strict=True)
    return Read(reduce(lambda whole, block: combine(whole, *block), sized, 0), [*crcs])


def block_crc(blocks: ShardBlocks, name: str, block: int) -> int | None:
    """Return the crc32 of the decoded bytes of a block; None where it cannot be read."""
    try:
        return crc32(blocks.read(name, block, block + 1).data)
    except UNREADABLE:
        return None


def cut(blocks: ShardBlocks) -> Iterator[SavedPiece]:
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
            yield SavedPiece(int(edges[run.start]), int(edges[run.stop]), name, run)
        position = int(edges[-1])
    yield from _gap(position, blocks.num_bytes)


def _gap(start: int, stop: int) -> Iterator[SavedPiece]:
    for first in range(start, stop, PIECE_BYTES):
        yield SavedPiece(first, min(first + PIECE_BYTES, stop))
