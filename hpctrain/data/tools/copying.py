"""All samples of a data set in their order, for what writes them anew; bounded memory."""

from collections.abc import Iterator
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hpctrain.core.atomic import reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.format.layout import Manifest
from hpctrain.data.format.rows import RaggedRows, Rows, cut
from hpctrain.data.tools.blocks import UNREADABLE, ShardBlocks, runs
from hpctrain.data.tools.faults import name_blocks


def stream(
    directory: Path,
    manifest: Manifest,
    start: int,
    stop: int,
    *,
    fields: tuple[str, ...] = (),
) -> Iterator[tuple[int, Rows]]:
    """Read the samples ``[start, stop)`` of some fields, by default all, a few blocks at a time.

    Yields the number of a first sample, and the samples from there on.

    Raises:
        CorruptError: a block is damaged or cannot be read.
    """
    names = fields or tuple(manifest.fields)
    first = 0
    for index, shard in enumerate(manifest.shards):
        last = first + shard.num_samples
        if max(start, first) < min(stop, last):
            inside = range(max(start - first, 0), min(stop, last) - first)
            yield from _of_shard(directory, manifest, index, inside, names)
        first = last


def _of_shard(
    directory: Path,
    manifest: Manifest,
    index: int,
    inside: range,
    names: tuple[str, ...],
) -> Iterator[tuple[int, Rows]]:
    size = manifest.block_size
    touched = range(inside.start // size, -(-inside.stop // size))
    try:
        with ShardBlocks(directory, manifest, index) as blocks:
            tables = {name: _table(blocks, name) for name in names}
            edges = reduce(add, (blocks.bounds(n) * blocks.row_bytes(n) for n in names))
            for run in runs(edges[touched.start : touched.stop + 1], touched.start):
                touched = run
                rows = {name: _rows(blocks, name, run, tables[name]) for name in names}
                begin = run.start * size
                start, stop = max(begin, inside.start), min(run.stop * size, inside.stop)
                yield blocks.first_sample + start, cut(rows, start - begin, stop - begin)
    except UNREADABLE as error:
        shard = manifest.shards[index]
        first = sum(before.num_samples for before in manifest.shards[:index])
        raise CorruptError(
            f"{name_blocks(touched)} of shard {directory / shard.file} cannot be read: "
            f"{reason_of(error)}; find all damage with hpctrain data verify {directory}",
            first + touched.start * size,
            first + min(touched.stop * size, shard.num_samples),
        ) from error


def _table(blocks: ShardBlocks, name: str) -> NDArray[Any]:
    table = blocks.table(name)
    if crc32(table.data) != blocks.shard.places[name].crc32:
        raise DataError(f"the checksums of field {name} are damaged")
    return table


def _rows(
    blocks: ShardBlocks, name: str, run: range, table: NDArray[Any]
) -> NDArray[Any] | RaggedRows:
    values = blocks.read(name, run.start, run.stop)
    for block, crc in zip(run, blocks.crcs(name, run, values), strict=True):
        if crc != table[block]:
            raise DataError(f"block {block} of field {name} has the wrong crc32")
    if not blocks.manifest.fields[name].ragged:
        return values
    size = blocks.manifest.block_size
    offsets = blocks.offsets(name)[run.start * size : run.stop * size + 1]
    return RaggedRows(values, offsets - offsets[0])
