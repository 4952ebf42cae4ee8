"""One shard opened for reading: its samples, or an error that says which cannot be had."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import CorruptError
from hpctrain.core.units import MIB
from hpctrain.data.format.layout import Manifest
from hpctrain.data.format.own import UNREADABLE
from hpctrain.data.io.ahead import advise, distinct, runs_of
from hpctrain.data.io.chunks import ChunkCache
from hpctrain.data.io.overlapped_copy import EarlyCopies
from hpctrain.data.io.plain_blocks import READ_BYTES
from hpctrain.data.io.read_ahead_queue import ReadPiece
from hpctrain.data.io.shardfile import ShardFile, ShardIO
from hpctrain.data.io.values import Array

_SPARSE = 4
"""From every fourth block on, a file of a set that stays in memory is read whole: in its order,
and in large pages, it comes more than twice as fast."""


def check_file(directory: Path, manifest: Manifest, index: int) -> None:
    """Check that the file of a shard is there and has the size it was written with.

    Raises:
        CorruptError: it is missing, cannot be seen, or is longer or shorter.
    """
    shard = manifest.shards[index]
    path = directory / shard.file
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise _lost(directory, manifest, index, reason_of(error)) from error
    if num_bytes != shard.num_bytes:
        why = (
            f"it has {shard.num_bytes} bytes by its manifest, got {num_bytes}: "
            f"it was truncated or replaced"
        )
        raise _lost(directory, manifest, index, why)


class OpenShard:
    """Gathers samples of one file; belongs to the process that opened it.

    Whatever fails is tried once more on the file opened anew, which heals a read that went
    wrong and a file that was replaced by a good copy. Several threads may read at once.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        index: int,
        *,
        io: ShardIO = "auto",
        chunks: ChunkCache | None = None,
    ) -> None:
        """Open the file.

        Args:
            directory: where it lies.
            manifest: of the data set.
            index: number of the shard.
            io: ``map`` it into memory, ``read`` what is wanted, or ``auto``: map it where it
                lies in memory; ``keep``: where it will stay there, too.
            chunks: keeps decoded chunks of several shards.

        Raises:
            CorruptError: the file is missing, or not the one that the manifest describes.
        """
        self._directory, self._manifest, self._index = directory, manifest, index
        self._shard = manifest.shards[index]
        self._first = sum(shard.num_samples for shard in manifest.shards[:index])
        self._io, self._chunks = io, chunks or ChunkCache()
        self._lock = Lock()
        self._num_taken = 0
        self.file = self._opened()

    def check_blocks(self, rows: Array, *, again: bool) -> None:
        """Check the crc32 of the blocks of some samples; unless ``again``, of new ones only.

        A file that was changed since it was opened is opened anew, and nothing of it counts as
        checked.

        Raises:
            CorruptError: bytes have changed, or the file has.
        """
        file = self.file
        if file.is_changed():
            file = self._reopened(file)
        if file.all_checked and not again:
            return
        blocks = np.unique(rows // self._manifest.block_size)
        if not again:
            file.arrivals.wait_for(blocks)
            blocks = blocks[~file.checked[blocks]]
        wrong = file.wrong_blocks(blocks)
        file.found(blocks, wrong)
        for block in wrong:
            self._check_block(block)
        file = self.file
        file.all_checked = bool(file.checked.all())

    def gather(
        self, name: str, rows: Array, out: NDArray[Any], places: Array | None = None
    ) -> None:
        """Copy samples of a field, numbered from the start of this shard.

        Args:
            name: of a field that is not ragged.
            rows: ``(num_samples,)``.
            out: contiguous, ``(at least num_samples, *shape)``.
            places: sample ``rows[i]`` goes to ``out[places[i]]``; by default to ``out[i]``.

        Raises:
            CorruptError: the file cannot be read.
        """
        self._read(rows, lambda file: file.values[name].take(rows, out, places))

    def lengths(self, name: str, rows: Array) -> Array:
        """Return the lengths of samples of a ragged field."""
        index = self.file.indices[name]
        return index[rows + 1] - index[rows]

    def gather_ragged(
        self, name: str, rows: Array, out: NDArray[Any], starts: Array | None = None
    ) -> None:
        """Copy samples of a ragged field, numbered from the start of this shard.

        Args:
            name: of the field.
            rows: ``(num_samples,)``.
            out: contiguous, ``(at least the sum of the lengths, *shape)``.
            starts: sample ``rows[i]`` begins at ``out[starts[i]]``; by default behind the one
                before.

        Raises:
            CorruptError: the file cannot be read.
        """
        lengths = self.lengths(name, rows)
        if starts is None:
            starts = np.cumsum(lengths) - lengths

        def copy(file: ShardFile) -> None:
            file.values[name].copy(file.indices[name][rows], lengths, out, starts)

        self._read(rows, copy)

    def coming(
        self,
        rows: Array,
        *,
        whole_blocks: bool = True,
        wait: bool = True,
        early: EarlyCopies | None = None,
    ) -> list[ReadPiece]:
        """Return what brings samples into memory: pieces of work for several threads, in order.

        Every piece must be done: from now on, whoever takes samples waits for the blocks.

        Args:
            rows: samples, numbered from the start of this shard, in any order.
            whole_blocks: bring the whole of their blocks, and check those that are new. What is
                wrong is left to whoever takes samples of it.
            wait: for all the blocks; else only for those that are being read.
            early: copies samples of new blocks as they come, if the file is mapped.
        """
        file, size = self.file, self._manifest.block_size
        if file.in_memory or not len(rows):
            return []
        blocks = distinct(rows // size)
        is_keeping = self._io == "keep" and file.is_mapped
        if is_keeping and len(blocks) * _SPARSE >= len(file.checked):
            file.sweep()
        if not whole_blocks:
            return [ReadPiece(lambda: ask_for(file, *runs_of(distinct(rows))))]
        is_new = ~file.checked[blocks]
        old, new = blocks[~is_new], blocks[is_new]
        if wait:
            file.arrivals.expect(new)
        bring: Callable[[Array], None] = file.bring
        if early is not None and file.is_mapped and len(new):
            bring = early.expect(file, self._first, new)
        return [*pieces_of_old(file, old), *pieces_of_new(file, new, bring)]

    def close(self) -> None:
        """Nothing is left to be done: the file is closed when nobody uses it any more."""

    def _read(self, rows: Array, copy: Callable[[ShardFile], None]) -> None:
        file = self._settled(len(rows))
        try:
            copy(file)
        except UNREADABLE:
            self._read_again(file, rows, copy)

    def _read_again(self, file: ShardFile, rows: Array, copy: Callable[[ShardFile], None]) -> None:
        file = self._reopened(file)
        try:
            copy(file)
        except UNREADABLE as error:
            for block in np.unique(rows // self._manifest.block_size).tolist():
                self._check_block(block)
            reason = reason_of(error)
            raise _lost(self._directory, self._manifest, self._index, reason) from error

    def _settled(self, num_samples: int) -> ShardFile:
        """Return the file; after as many samples as it has, look again where it lies."""
        self._num_taken += num_samples
        if self._num_taken > self._shard.num_samples:
            self._num_taken = 0
            file = self.file
            if self._io in ("auto", "keep") and file.wants_map() != file.is_mapped:
                self._reopened(file)
        return self.file

    def _check_block(self, block: int) -> None:
        file = self.file
        if file.problem(block) is not None:
            self._forget(file, block)
            file = self._reopened(file)
            if (problem := file.problem(block)) is not None:
                start = self._first + block * self._manifest.block_size
                stop = min(
                    start + self._manifest.block_size, self._first + self._shard.num_samples
                )
                raise CorruptError(
                    f"shard {self._directory / self._shard.file} is damaged: {problem}, samples "
                    f"{start} to {stop - 1} of the data set; copy the file again",
                    start,
                    stop,
                )
        file.checked[block] = True

    def _forget(self, file: ShardFile, block: int) -> None:
        """Let the next read of a block come from the disk."""
        start = np.array([block * self._manifest.block_size])
        stop = np.minimum(start + self._manifest.block_size, self._shard.num_samples)
        with suppress(*UNREADABLE):
            for name in file.values:
                for begin, end in zip(*file.extents(name, start, stop), strict=True):
                    os.posix_fadvise(
                        file.descriptor, int(begin), int(end - begin), os.POSIX_FADV_DONTNEED
                    )

    def _opened(self) -> ShardFile:
        path = self._directory / self._shard.file
        try:
            return ShardFile(path, self._manifest, self._index, io=self._io, chunks=self._chunks)
        except UNREADABLE as error:
            why = reason_of(error)
            raise _lost(self._directory, self._manifest, self._index, why) from error

    def _reopened(self, old: ShardFile) -> ShardFile:
        with self._lock:
            if self.file is old:
                old.close_hdf5()
                new = self._opened()
                if new.identity == old.identity:
                    new.checked[:] = old.checked
                    new.all_checked = old.all_checked
                self.file, old.is_replaced = new, True
            return self.file


def _lost(directory: Path, manifest: Manifest, index: int, why: str) -> CorruptError:
    shard = manifest.shards[index]
    start = sum(before.num_samples for before in manifest.shards[:index])
    stop = start + shard.num_samples
    return CorruptError(
        f"cannot read shard {directory / shard.file}: {why}; samples {start} to {stop - 1} of "
        f"the data set are in it; copy it again or check the mount",
        start,
        stop,
    )


_APART_BYTES = 4 * MIB
"""Of blocks that lie apart, in one piece of work: they are read one by one anyhow."""
_SWEPT_BYTES = 64 * MIB
"""Of a file that is swept, read on by one call."""


def pieces_of_old(file: ShardFile, blocks: Array) -> list[ReadPiece]:
    """Return what brings blocks that were checked before; ``blocks`` grow, maybe none."""
    return [ReadPiece(lambda: _ask_for_runs(file, blocks))] if len(blocks) else []


def pieces_of_new(
    file: ShardFile, blocks: Array, bring: Callable[[Array], None]
) -> list[ReadPiece]:
    """Return what brings and checks blocks.

    Args:
        file: has them.
        blocks: growing, maybe none.
        bring: does so with some of them: ``file.bring``, or what does more.
    """
    if file.is_swept:
        parts = _cut(file, blocks, _SWEPT_BYTES)
        checks = [ReadPiece(partial(bring, part)) for part in _cut(file, blocks, READ_BYTES)]
        return [
            *(ReadPiece(partial(_sweep, file, part), is_sweep=True) for part in parts),
            *checks,
        ]
    # Of blocks that lie apart, the disk has many to find at the same time.
    num_runs = len(runs_of(blocks)[0]) if len(blocks) else 0
    if num_runs * MIB > len(blocks) * file.block_bytes:
        return [
            ReadPiece(partial(bring, part), partial(_ask_for_runs, file, part))
            for part in _cut(file, blocks, _APART_BYTES)
        ]
    return [ReadPiece(partial(bring, part)) for part in _cut(file, blocks, READ_BYTES)]


def ask_for(file: ShardFile, starts: Array, stops: Array) -> None:
    """Ask for the samples ``[starts[i], stops[i])``; of a file that is swept, wait for them."""
    for name in file.read_on:
        begins, ends = file.extents(name, starts, stops)
        parts = zip(begins.tolist(), ends.tolist(), strict=True)
        if not (
            file.is_swept
            and file.space
            and all(file.space.bring(begin, end - begin) for begin, end in parts)
        ):
            advise(file.descriptor, begins, ends)


def _sweep(file: ShardFile, blocks: Array) -> None:
    """Read on without a gap, while other threads check what has come."""
    _ask_for_blocks(file, blocks[:1], blocks[-1:] + 1)


def _ask_for_runs(file: ShardFile, blocks: Array) -> None:
    _ask_for_blocks(file, *runs_of(blocks))


def _ask_for_blocks(file: ShardFile, starts: Array, stops: Array) -> None:
    """Ask for the samples of the blocks ``[starts[i], stops[i])``."""
    size = file.block_size
    ask_for(file, starts * size, np.minimum(stops * size, file.shard.num_samples))


def _cut(file: ShardFile, blocks: Array, num_bytes: int) -> list[Array]:
    """Cut blocks into parts of about so many bytes each."""
    num_parts = min(len(blocks), -(-len(blocks) * file.block_bytes // num_bytes))
    return np.array_split(blocks, num_parts) if num_parts else []
