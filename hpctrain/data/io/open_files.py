"""Open files of a data set in one process, with their threads and memory."""

import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from numpy.typing import NDArray

from hpctrain.cluster.memory import available_bytes
from hpctrain.core.errors import DataError
from hpctrain.core.units import GIB
from hpctrain.data.format.compression import is_compressed
from hpctrain.data.format.layout import Manifest
from hpctrain.data.format.own import UNREADABLE
from hpctrain.data.io.buffers import Buffers
from hpctrain.data.io.chunks import ChunkCache
from hpctrain.data.io.joined_map import Stitched
from hpctrain.data.io.open_shard import OpenShard
from hpctrain.data.io.overlapped_copy import EarlyCopies, Parts
from hpctrain.data.io.read_ahead_queue import Line, ReadPiece
from hpctrain.data.io.shardfile import IO, ShardIO
from hpctrain.data.io.values import Array

_FIRST_TRIES = 64
_WAIT_BYTES = 4 * GIB
"""Up to here, samples are not to be had before all that is read ahead has come, in file order."""
_ROOM = 2
"""So many times the size of a data set must be free before all of it is kept in memory."""
_ROOM_TWICE = 3
"""The same where its samples are copied early: then they are in memory twice."""


class ReadableShard(Protocol):
    """What a data set asks of a shard: see ``OpenShard``, also for the arguments."""

    def check_blocks(self, rows: Array, *, again: bool) -> None:
        """Check the blocks of samples."""

    def gather(
        self, name: str, rows: Array, out: NDArray[Any], places: Array | None = None
    ) -> None:
        """Copy samples of a field."""

    def lengths(self, name: str, rows: Array) -> Array:
        """Return the lengths of samples of a ragged field."""

    def gather_ragged(
        self, name: str, rows: Array, out: NDArray[Any], starts: Array | None = None
    ) -> None:
        """Copy samples of a ragged field."""

    def coming(
        self,
        rows: Array,
        *,
        whole_blocks: bool = True,
        wait: bool = True,
        early: EarlyCopies | None = None,
    ) -> list[ReadPiece]:
        """Return what brings samples into memory."""

    def close(self) -> None:
        """Free what is open."""


class Opener(Protocol):
    """Opens a shard, picklable; ``OpenShard`` is one."""

    def __call__(
        self, directory: Path, manifest: Manifest, index: int, *, io: ShardIO, chunks: ChunkCache
    ) -> ReadableShard:
        """Open shard ``index``; ``io`` and ``chunks`` as for ``OpenShard``."""


class Handles:
    """Shards opened at first use; those used longest ago are closed when there are too many."""

    def __init__(
        self, manifest: Manifest, open_shard: Callable[..., ReadableShard], io: IO
    ) -> None:
        """Open nothing yet; ``open_shard`` opens a shard by its number and ``io``."""
        self.pid = os.getpid()
        self.buffers = Buffers()
        self.stitched: Stitched | None = None
        self.is_in_memory = False
        """What ``look_in_memory`` has seen."""
        self._manifest = manifest
        self._open_shard = open_shard
        self._shards: OrderedDict[int, ReadableShard] = OrderedDict()
        # HDF5 needs a descriptor of its own, and the program some as well.
        self._max_open = max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._is_full = len(manifest.shards) > self._max_open
        room = 0.0 if self._is_full or io != "auto" else _room_for(manifest)
        self.stay_in_memory = room >= _ROOM
        """Whether all files do, open, once they were read."""
        is_ragged = any(field.ragged for field in manifest.fields.values())
        self._copies_early = room >= _ROOM_TWICE and not is_ragged
        self._io: ShardIO = "keep" if self.stay_in_memory else io
        self._lock = Lock()
        self._line = Line()
        self._num_tries = 0

    def shard(self, index: int) -> ReadableShard:
        """Return an open shard.

        Raises:
            CorruptError: it cannot be opened.
        """
        found = self._shards.get(index)
        if found is None or self._is_full:
            with self._lock:
                found = self._shards.get(index) or self._open_shard(index, io=self._io)
                self._shards[index] = found
                self._shards.move_to_end(index)
                if len(self._shards) > self._max_open:
                    # Other threads may be reading it: it is closed when the last one lets go.
                    self._shards.popitem(last=False)
        return found

    def rows_of(self, wanted: Array) -> tuple[Stitched, Array] | None:
        """Return the array of all shards and the rows of samples in it, if there is one."""
        stitched = self.stitched
        if stitched is None:
            self._stitch()
            return None
        rows = stitched.rows_of(wanted)
        if rows is None:
            self.stitched = None
            return None
        return stitched, rows

    def look_in_memory(self) -> bool:
        """Look whether all shards lie in memory and are mapped; once they do, that is that."""
        if self.stitched is None:
            self._stitch()
        if self.stitched is not None and not self.is_in_memory:
            self.is_in_memory = self.stitched.is_in_memory()
        return self.stitched is not None and self.is_in_memory

    def bring(
        self,
        parts: Iterable[tuple[int, Array, Any]],
        *,
        num_bytes: float,
        whole_blocks: bool,
        order: Parts | None = None,
    ) -> EarlyCopies | None:
        """Begin to bring samples into memory, in threads of their own.

        Args:
            parts: of some shards, the number, rows in it, and whatever.
            num_bytes: of all these samples, about.
            whole_blocks: as for ``OpenShard.coming``.
            order: in which they will be taken, if nothing is before all has come.

        Returns:
            Where to take them, if they are copied as they come.
        """
        # A batch that can be had soon is not kept waiting for gigabytes of others.
        wait, early = num_bytes <= _WAIT_BYTES, None
        if order is not None and wait and self._copies_early:
            early = EarlyCopies(self._manifest.fields, self._manifest.num_samples, order)
        for home, rows, _ in parts:
            # Whatever is wrong with a shard is told by the one who takes samples from it.
            with suppress(DataError, *UNREADABLE):
                shard = self.shard(home)
                self._line.join(
                    shard.coming(rows, whole_blocks=whole_blocks, wait=wait, early=early)
                )
        return early

    def _stitch(self) -> None:
        """Join all shards to one array, now and then tried: once all are open and in memory."""
        self._num_tries += 1
        is_due = self._num_tries < _FIRST_TRIES or self._num_tries % _FIRST_TRIES == 0
        if len(self._shards) < len(self._manifest.shards) or not is_due:
            return
        with self._lock:
            shards = [self._shards.get(index) for index in range(len(self._shards))]
            files = [
                shard.file
                for shard in shards
                if isinstance(shard, OpenShard) and type(shard).gather is OpenShard.gather
            ]
            if self.stitched is None and len(files) == len(shards):
                self.stitched = Stitched.of(self._manifest, files)


def _room_for(manifest: Manifest) -> float:
    """Return how many times memory could hold all files, 0 if they are not read as they lie."""
    if is_compressed(manifest.fields):
        return 0.0
    return (available_bytes() or 0) / max(1, manifest.num_bytes)
