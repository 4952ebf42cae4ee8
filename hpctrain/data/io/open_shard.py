"""One shard opened for reading: its samples, or an error that says which cannot be had."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import CorruptError
from hpctrain.data.format.hdf5_values import UNREADABLE
from hpctrain.data.format.layout import Manifest
from hpctrain.data.io.shardfile import IO, ShardFile, size_problem
from hpctrain.data.io.values import Array, ChunkCache


def check_file(directory: Path, manifest: Manifest, index: int) -> None:
    """Check that the file of a shard is there and has the size it was written with.

    Raises ``CorruptError``: it is missing, cannot be seen, or is longer or shorter.
    """
    shard = manifest.shards[index]
    path = directory / shard.file
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise _lost(directory, manifest, index, reason_of(error)) from error
    if problem := size_problem(shard, num_bytes):
        raise _lost(directory, manifest, index, problem)


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
        io: IO = "auto",
        chunks: ChunkCache | None = None,
    ) -> None:
        """Open the file of shard ``index``, which lies in ``directory``.

        ``io`` is as of ``ShardedDataset``; ``auto`` maps a file that lies in memory. ``chunks``
        keeps decoded chunks of several shards. Raises ``CorruptError``: the file is missing, or
        not the one that the manifest describes.
        """
        self._directory, self._manifest, self._index = directory, manifest, index
        self._path = directory / manifest.shards[index].file
        self._io, self._chunks = io, chunks or ChunkCache()
        self._lock = Lock()
        self.file = self._opened()

    def check_blocks(self, rows: Array, *, again: bool) -> None:
        """Check the crc32 of the blocks of some samples; unless ``again``, of new ones only.

        A file that was changed since it was opened is opened anew, and nothing of it counts as
        checked. Raises ``CorruptError``: bytes have changed, or the file has.
        """
        file = self.file
        if file.is_changed():
            file = self._reopened(file)
        if file.all_checked and not again:
            return
        blocks = np.unique(rows // self._manifest.block_size)
        if not again:
            file.wait_for(blocks[~file.checked[blocks]])
            blocks = blocks[~file.checked[blocks]]
        wrong = file.wrong_blocks(blocks)
        file.found(blocks, wrong)
        for block in wrong:
            self._check_block(block)
        file = self.file
        file.all_checked = bool(file.checked.all())

    def gather(self, name: str, rows: Array, out: NDArray[Any], places: Array | None) -> None:
        """Copy samples of a field that is not ragged, numbered from the start of this shard.

        Sample ``rows[i]`` goes to ``out[places[i]]``, or without places to ``out[i]``. Raises
        ``CorruptError``: the file cannot be read.
        """
        self._read(rows, lambda file: file.values[name].take(rows, out, places))

    def lengths(self, name: str, rows: Array) -> Array:
        """Return the lengths of samples of a ragged field."""
        index = self.file.indices[name]
        return index[rows + 1] - index[rows]

    def gather_ragged(self, name: str, rows: Array, out: NDArray[Any], starts: Array) -> None:
        """Copy samples of a ragged field, numbered from the start of this shard.

        Sample ``rows[i]`` begins at ``out[starts[i]]``. Raises ``CorruptError``: the file cannot
        be read.
        """
        lengths = self.lengths(name, rows)

        def copy(file: ShardFile) -> None:
            file.values[name].copy(file.indices[name][rows], lengths, out, starts)

        self._read(rows, copy)

    def _read(self, rows: Array, copy: Callable[[ShardFile], None]) -> None:
        file = self.file
        try:
            copy(file)
        except UNREADABLE:
            self._read_again(self._reopened(file), rows, copy)

    def _read_again(self, file: ShardFile, rows: Array, copy: Callable[[ShardFile], None]) -> None:
        try:
            copy(file)
        except UNREADABLE as error:
            for block in np.unique(rows // self._manifest.block_size).tolist():
                self._check_block(block)
            raise self._lost(error) from error

    def _check_block(self, block: int) -> None:
        file = self.file
        if file.problem(block) is not None:
            with suppress(OSError):  # so that the next read comes from the disk
                os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            file = self._reopened(file)
            if (problem := file.problem(block)) is not None:
                start, end = self._manifest.samples_of(self._index)
                start += block * self._manifest.block_size
                stop = min(start + self._manifest.block_size, end)
                raise CorruptError(
                    f"shard {self._path} is damaged: {problem}, samples "
                    f"{start} to {stop - 1} of the data set; copy the file again",
                    start,
                    stop,
                )
        file.checked[block] = True

    def _opened(self) -> ShardFile:
        try:
            return ShardFile(
                self._path, self._manifest, self._index, io=self._io, chunks=self._chunks
            )
        except UNREADABLE as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException) -> CorruptError:
        return _lost(self._directory, self._manifest, self._index, reason_of(error))

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
    start, stop = manifest.samples_of(index)
    return CorruptError(
        f"cannot read shard {directory / manifest.shards[index].file}: {why}; "
        f"samples {start} to {stop - 1} of the data set are in it; copy it again or check the "
        f"mount",
        start,
        stop,
    )
