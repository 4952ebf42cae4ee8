"""A data set written anew: with other shards, blocks or compression, or in parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.atomic import reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.format.columns import RaggedRows, Rows, count, cut
from hpctrain.data.format.layout import PLAIN_NAME, Field, Manifest, classes_of
from hpctrain.data.order.order import global_order
from hpctrain.data.tools.faults import name_blocks
from hpctrain.data.tools.shard_blocks import UNREADABLE, ShardBlocks, runs
from hpctrain.data.tools.shared_work import (
    Advance,
    Start,
    followed,
    in_turns,
    or_alone,
    read_manifest,
    share,
)
from hpctrain.data.writer import ShardWriter

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

_TAG = 1 << 63
"""Keeps the permutation of a split apart from those of epochs, which count from 0."""

Shares = Mapping[str, Fraction]
"""Share of each part; they sum to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How a data set is cut; what is None stays as it is."""

    samples_per_shard: int | None = None
    """Samples of each shard but the last."""
    shard_bytes: int | None = None
    """Or about this many bytes of samples, before compression."""
    block_size: int | None = None
    """Samples per checksum."""
    compression: str | None = None
    """``none`` or ``zstd``, of all fields."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("samples_per_shard", "shard_bytes", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name} must be positive, got {value}")
        if self.samples_per_shard and self.shard_bytes:
            raise DataError("a shard is cut by its samples or by its bytes; give one of them")
        if self.compression not in (None, "none", "zstd"):
            raise DataError(f"compression is zstd or none, got {self.compression!r}")


def reshard(
    directory: Path | str,
    out: Path | str,
    shape: Shape,
    comm: "Communicator | None" = None,
    *,
    start: Start | None = None,
) -> Manifest:
    """Write all samples of a data set, in their order, to another directory.

    Collective with ``comm``: each rank writes some of the shards; they are the same for any
    number of ranks. Needs memory for a few MiB, or a few blocks if these are larger. Every block
    is checked as it is read. After a kill, the same call goes on with the shards that are done.

    ``start`` makes what follows the progress of this rank, in samples.

    Raises:
        DataError: the data set is damaged, or the new one cannot be written; on every rank.
    """
    directory, out, comm = Path(directory), Path(out), or_alone(comm)
    manifest = read_manifest(directory, comm)
    samples_per_shard = _samples_per_shard(manifest, shape)
    first, stop = share(manifest.num_samples, comm, samples_per_shard)
    advance = followed(start, stop - first)
    with ShardWriter(
        out,
        _fields(manifest, shape),
        samples_per_shard=samples_per_shard,
        split=manifest.split,
        block_size=shape.block_size or manifest.block_size,
        comm=comm,
        resume_key=f"reshard {manifest.uuid}",
        may_replace=False,
        classes=classes_of(directory, manifest),
    ) as writer:
        advance(writer.num_written)
        pieces = stream(directory, manifest, first + writer.num_written, stop)
        in_turns(comm, _written(pieces, writer.append, advance))
    return writer.manifest


def split(
    directory: Path | str,
    out: Path | str,
    shares: Shares,
    comm: "Communicator | None" = None,
    *,
    seed: int = 0,
    start: Start | None = None,
) -> dict[str, Manifest]:
    """Write each part of a data set to a directory of its own, ``out/<part>``.

    Every sample is in just one part, where all keep their order. Which one is a function of
    ``seed`` in [0, 2^64), number and shares, which sum to 1. Collective with ``comm``, whose
    ranks share the work; ``start`` makes what follows the progress of this rank, in samples.

    Raises:
        DataError: a part would get no sample, the data set is damaged, or a part cannot be
            written; on every rank.
    """
    directory, out, comm = Path(directory), Path(out), or_alone(comm)
    manifest = read_manifest(directory, comm)
    first, stop = share(manifest.num_samples, comm, manifest.block_size)
    part_of = parts_drawn(sizes_of(manifest.num_samples, shares), seed)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                ShardWriter(
                    out / name,
                    manifest.fields,
                    samples_per_shard=max(shard.num_samples for shard in manifest.shards),
                    split=name,
                    block_size=manifest.block_size,
                    comm=comm,
                    may_replace=False,
                    classes=classes_of(directory, manifest),
                )
            )
            for name in shares
        ]
        num_dealt = 0

        def deal(rows: Rows) -> None:
            nonlocal num_dealt
            parts = part_of(first + num_dealt + np.arange(count(rows)))
            num_dealt += count(rows)
            for number, writer in enumerate(writers):
                writer.append(_select(rows, parts == number))

        pieces = stream(directory, manifest, first, stop)
        in_turns(comm, _written(pieces, deal, followed(start, stop - first)))
    return {name: writer.manifest for name, writer in zip(shares, writers, strict=True)}


def parse_shares(texts: Sequence[str]) -> dict[str, Fraction]:
    """Read shares such as ``train=0.9`` or ``test=1/10``.

    Raises:
        DataError: one cannot be read, a name comes twice, or they do not sum to 1.
    """
    shares: dict[str, Fraction] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            share = Fraction(value)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not PLAIN_NAME.fullmatch(name) or share <= 0:
            raise DataError(f"a part is a name and a share such as train=0.9, got {text!r}")
        if name in shares:
            raise DataError(f"each part has a name of its own, got {name} twice")
        shares[name] = share
    if sum(shares.values()) != 1:
        raise DataError(
            f"the shares of all parts sum to 1, {' + '.join(map(str, texts))} sum to "
            f"{float(sum(shares.values())):g}"
        )
    return shares


def sizes_of(num_samples: int, shares: Shares) -> list[int]:
    """Return the samples of each part: its share, rounded so that they sum to ``num_samples``.

    Raises:
        DataError: a part would get no sample.
    """
    exact = [num_samples * share for share in shares.values()]
    sizes = [int(share) for share in exact]
    lacking = sorted(range(len(sizes)), key=lambda part: sizes[part] - exact[part])
    for part in lacking[: num_samples - sum(sizes)]:
        sizes[part] += 1
    for name, size in zip(shares, sizes, strict=True):
        if not size:
            raise DataError(
                f"each part gets at least one sample, {name} gets none of {num_samples}; "
                f"give it a larger share"
            )
    return sizes


def parts_drawn(
    sizes: Sequence[int], seed: int
) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Draw parts of so many samples; return what tells the part of samples from their numbers."""
    ends = np.cumsum(sizes)
    order = global_order(int(ends[-1]), seed, _TAG)
    return lambda samples: np.searchsorted(ends, order.positions_of(samples), side="right")


def stream(directory: Path, manifest: Manifest, start: int, stop: int) -> Iterator[Rows]:
    """Read the samples ``[start, stop)``, a few blocks at a time.

    Raises:
        CorruptError: a block is damaged or cannot be read.
    """
    for index in range(len(manifest.shards)):
        first, last = manifest.samples_of(index)
        if max(start, first) < min(stop, last):
            inside = range(max(start, first) - first, min(stop, last) - first)
            yield from _of_shard(directory, manifest, index, inside)


def _of_shard(directory: Path, manifest: Manifest, index: int, inside: range) -> Iterator[Rows]:
    size, names = manifest.block_size, list(manifest.fields)
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
                yield cut(rows, start - begin, stop - begin)
    except UNREADABLE as error:
        first, last = manifest.samples_of(index)
        raise CorruptError(
            f"{name_blocks(touched)} of shard {directory / manifest.shards[index].file} cannot be "
            f"read: {reason_of(error)}; find all damage with hpctrain data verify {directory}",
            first + touched.start * size,
            min(first + touched.stop * size, last),
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


def _written(
    pieces: Iterator[Rows], write: Callable[[Rows], None], advance: Advance
) -> Iterator[None]:
    for rows in pieces:
        write(rows)
        advance(count(rows))
        yield


def _samples_per_shard(manifest: Manifest, shape: Shape) -> int:
    if shape.samples_per_shard:
        return shape.samples_per_shard
    if not shape.shard_bytes:
        return max(shard.num_samples for shard in manifest.shards)
    num_samples = max(1, round(shape.shard_bytes / max(1, manifest.sample_bytes)))
    block = shape.block_size or manifest.block_size
    return num_samples // block * block or num_samples


def _fields(manifest: Manifest, shape: Shape) -> dict[str, Field]:
    if shape.compression is None:
        return dict(manifest.fields)
    compression = None if shape.compression == "none" else shape.compression
    return {
        name: replace(field, compression=compression) for name, field in manifest.fields.items()
    }


def _select(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    """Return the samples for which ``mask`` is true."""
    return {
        name: _select_ragged(some, mask) if isinstance(some, RaggedRows) else some[mask]
        for name, some in rows.items()
    }


def _select_ragged(some: RaggedRows, mask: NDArray[np.bool_]) -> RaggedRows:
    lengths = np.diff(some.offsets)
    values: NDArray[Any] = some.values[some.offsets[0] : some.offsets[-1]]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[mask])])
    return RaggedRows(values[np.repeat(mask, lengths)], offsets)
