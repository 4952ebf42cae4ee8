"""A shard of which the node has a copy: all of it, or some blocks."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import CorruptError
from hpctrain.core.logs import logger
from hpctrain.data.format.layout import Manifest
from hpctrain.data.io.chunks import ChunkCache
from hpctrain.data.io.open_files import ReadableShard
from hpctrain.data.io.open_shard import OpenShard
from hpctrain.data.io.shardfile import IO
from hpctrain.data.io.staging.staging_directory import StageDirectory
from hpctrain.data.io.staging.staging_plan import Chosen
from hpctrain.data.io.values import Array


@dataclass(frozen=True)
class StagedOpener:
    """Opens shards from the node's copy as far as it goes; picklable."""

    directory: Path
    """Of the copy."""
    present: Mapping[int, Chosen | None]
    """For each shard that was copied, its blocks; None for all."""
    lease: StageDirectory | None = field(repr=False, compare=False)
    """Keeps the copy; the process that made it has it, not those that got this by pickle."""

    def __call__(
        self, directory: Path, manifest: Manifest, index: int, *, io: IO, chunks: ChunkCache
    ) -> ReadableShard:
        """Open a shard; from ``directory`` where there is no copy, or none that can be read."""

        def source() -> OpenShard:
            return OpenShard(directory, manifest, index, io=io, chunks=chunks)

        if index not in self.present:
            return source()
        try:
            staged = OpenShard(self.directory, manifest, index, io=io, chunks=chunks)
        except CorruptError as error:
            logger.warning("%s; it is read from %s from now on", error, directory)
            return source()
        blocks = self.present[index]
        if blocks is None:
            return staged
        return PartialShard(staged, source, blocks, manifest.block_size)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        return {**self.__dict__, "lease": None}


class PartialShard:
    """A shard whose copy lacks blocks: those are read from the data set itself.

    See ``OpenShard`` for the methods. The data set's file is opened when it is first needed.
    """

    def __init__(
        self,
        staged: OpenShard,
        open_source: Callable[[], OpenShard],
        blocks: Chosen,
        block_size: int,
    ) -> None:
        """Join the two.

        Args:
            staged: the copy, whole but for the data of the other blocks.
            open_source: opens the file of the data set.
            blocks: for each block, whether the copy has it.
            block_size: samples of a block.
        """
        self._staged = staged
        self._open_source = open_source
        self._blocks = blocks
        self._block_size = block_size

    @cached_property
    def _source(self) -> OpenShard:
        return self._open_source()

    def check_blocks(self, rows: Array, *, again: bool) -> None:
        """Check the blocks of samples where they are read."""
        if not len(rows):
            self._staged.check_blocks(rows, again=again)
        for shard, here in self._parts(rows):
            shard.check_blocks(rows[here], again=again)

    def gather(
        self, name: str, rows: Array, out: NDArray[Any], places: Array | None = None
    ) -> None:
        """Copy samples of a field."""
        if places is None:
            places = np.arange(len(rows))
        for shard, here in self._parts(rows):
            shard.gather(name, rows[here], out, places[here])

    def lengths(self, name: str, rows: Array) -> Array:
        """Return the lengths of samples of a ragged field; the copy has all of them."""
        return self._staged.lengths(name, rows)

    def gather_ragged(
        self, name: str, rows: Array, out: NDArray[Any], starts: Array | None = None
    ) -> None:
        """Copy samples of a ragged field."""
        if starts is None:
            lengths = self.lengths(name, rows)
            starts = np.cumsum(lengths) - lengths
        for shard, here in self._parts(rows):
            shard.gather_ragged(name, rows[here], out, starts[here])

    def will_need(self, rows: Array, threads: Executor, *, check: bool) -> None:
        """Let threads bring samples into memory."""
        for shard, here in self._parts(rows):
            shard.will_need(rows[here], threads, check=check)

    def close(self) -> None:
        """Close both files."""
        self._staged.close()
        if "_source" in self.__dict__:
            self._source.close()

    def _parts(self, rows: Array) -> Iterator[tuple[OpenShard, Any]]:
        """Yield each file that some of the samples are read from, and which ones those are."""
        present = self._blocks[rows // self._block_size]
        if present.all():
            if len(rows):
                yield self._staged, slice(None)
            return
        yield self._source, ~present
        if present.any():
            yield self._staged, present
