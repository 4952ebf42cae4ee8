"""Open files of a data set in one process, with their threads and memory."""

import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Any

from hpctrain.cluster.resources import available_bytes
from hpctrain.core.errors import DataError
from hpctrain.data.format.hdf5_values import UNREADABLE
from hpctrain.data.format.layout import Manifest
from hpctrain.data.io.gathering import Buffers
from hpctrain.data.io.joined_map import JoinedMap
from hpctrain.data.io.open_shard import OpenShard
from hpctrain.data.io.shardfile import IO, THREADS, read_ahead
from hpctrain.data.io.values import Array

_ROOM = 2  # so many times the size of a data set must be free before all of it is mapped unseen


Opener = Callable[..., OpenShard]  # opens a shard, with the arguments of ``OpenShard``; picklable


class Handles:
    """Shards opened at first use; those used longest ago are closed when there are too many."""

    def __init__(self, manifest: Manifest, open_shard: Callable[..., OpenShard], io: IO) -> None:
        self.pid = os.getpid()
        self.buffers = Buffers()
        self.joined: JoinedMap | None = None
        self._manifest = manifest
        self._open_shard = open_shard
        self._shards: OrderedDict[int, OpenShard] = OrderedDict()
        # HDF5 needs a descriptor of its own, and the program some as well.
        self._max_open = max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._is_full = len(manifest.shards) > self._max_open
        room = (available_bytes() or 0) / max(1, manifest.num_bytes)
        self._fits = room >= _ROOM
        self._io: IO = "map" if io == "auto" and not self._is_full and self._fits else io
        self._can_join = True
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(THREADS, "hpctrain-ahead")

    def shard(self, index: int) -> OpenShard:
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

    def rows_of(self, wanted: Array) -> tuple[JoinedMap, Array] | None:
        """Return the array of all shards and the rows of samples in it, if there is one."""
        joined = self.joined
        if joined is None:
            joined = self._join()
        rows = None if joined is None else joined.rows_of(wanted)
        if joined is None or rows is None:
            self.joined = None
            return None
        return joined, rows

    def is_in_memory(self) -> bool:
        """Return whether all shards are mapped, and were in memory or have come there."""
        joined = self.joined or self._join()
        return joined is not None and joined.is_in_memory(fits=self._fits)

    def will_need(self, parts: Iterable[tuple[int, Array, Any]], *, check: bool) -> None:
        """Begin to bring rows of shards into memory, in threads of their own."""
        for home, rows, _ in parts:
            # Whatever is wrong with a shard is told by the one who takes samples from it.
            with suppress(DataError, *UNREADABLE):
                read_ahead(self._threads, self.shard(home).file, rows, check=check)

    def _join(self) -> JoinedMap | None:
        """Join all shards to one array, once all are open and if they can be joined."""
        if not self._can_join or len(self._shards) < len(self._manifest.shards):
            return None
        with self._lock:
            if self.joined is None:
                files = [self._shards[index].file for index in range(len(self._shards))]
                self.joined = JoinedMap.of(self._manifest, files)
                self._can_join = self.joined is not None
            return self.joined
