"""Open shards of a data set in one process, and threads that read ahead."""

import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np

from hpctrain.cluster.resources import available_bytes
from hpctrain.core.errors import DataError
from hpctrain.core.units import KIB, MIB
from hpctrain.data.format.dataset_manifest import Manifest
from hpctrain.data.format.hdf5_values import UNREADABLE
from hpctrain.data.io.shardfile import IO, OpenShard, ShardFile
from hpctrain.data.io.values import Array

_ROOM = 2  # map a data set only if the free memory is at least this multiple of its size

Opener = Callable[..., OpenShard]  # takes the arguments of ``OpenShard``; can be pickled


class Handles:
    """Open shards of a data set, at most a quarter of the descriptor limit.

    A shard is opened at its first use. Above the limit, the least recently used shard is closed.
    """

    def __init__(self, manifest: Manifest, open_shard: Callable[..., OpenShard], io: IO) -> None:
        self.pid = os.getpid()
        self._manifest = manifest
        self._open_shard = open_shard
        self._shards: OrderedDict[int, OpenShard] = OrderedDict()
        # HDF5 and the program need further descriptors.
        self._max_open = max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._is_full = len(manifest.shards) > self._max_open
        self._fits = (available_bytes() or 0) >= _ROOM * manifest.num_bytes
        self._io: IO = "map" if io == "auto" and not self._is_full and self._fits else io
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(THREADS, "hpctrain-ahead")

    def shard(self, index: int) -> OpenShard:
        """Return an open shard.

        Raises:
            CorruptError: the shard cannot be opened.
        """
        found = self._shards.get(index)
        if found is None or self._is_full:
            with self._lock:
                found = self._shards.get(index) or self._open_shard(index, io=self._io)
                self._shards[index] = found
                self._shards.move_to_end(index)
                if len(self._shards) > self._max_open:
                    # Other threads may still read the shard; its last reference closes the file.
                    self._shards.popitem(last=False)
        return found

    def is_in_memory(self) -> bool:
        """Return whether all shards are mapped and in memory."""
        if not self._fits or len(self._shards) < len(self._manifest.shards):
            return False
        with self._lock:
            return all(shard.file.is_in_memory for shard in self._shards.values())

    def will_need(self, parts: Iterable[tuple[int, Array, Any]], *, check: bool) -> None:
        """Start reading rows of shards into memory, in separate threads.

        An item of ``parts`` is ``(shard, rows, places)``; the places are ignored.
        """
        for home, rows, _ in parts:
            # An error of a shard is raised when samples are read from the shard.
            with suppress(DataError, *UNREADABLE):
                file = self.shard(home).file
                read_ahead(self._threads, file, rows, check=check, stays=self._fits)


THREADS = 4  # some threads read while others compute checksums
_PIECE_BYTES = 4 * MIB  # bytes of consecutive blocks that one thread reads
_REQUEST_BYTES = 128 * KIB
"""Size of a request to read ahead. For one request, Linux reads at most its read-ahead window,
128 KiB by default."""


def read_ahead(
    threads: Executor, file: ShardFile, rows: Array, *, check: bool, stays: bool
) -> None:
    """Start threads that read rows of a file into memory, in file order, and return immediately.

    Args:
        threads: executor of the reads and checks.
        file: file of the rows.
        rows: rows of the file, in any order.
        check: whether to read whole blocks and to check blocks that were not checked before. A
            damaged block raises an error when its samples are taken.
        stays: whether checked blocks stay in memory, so that they need not be read again.
    """
    if not len(rows):
        return
    if not check:
        threads.submit(_advise, file, np.unique(rows), 1)
        return
    blocks = np.unique(rows // file.block_size)
    if stays:
        blocks = blocks[~file.checked[blocks]]
    shard = file.shard
    piece = max(1, _PIECE_BYTES * shard.num_samples // (shard.num_bytes * file.block_size))
    for start in range(0, len(blocks), piece):
        threads.submit(_read_blocks, file, blocks[start : start + piece])


def _read_blocks(file: ShardFile, blocks: Array) -> None:
    """Read blocks and check the crc32 of unchecked blocks; damaged blocks stay unchecked."""
    _advise(file, blocks, file.block_size)
    new = blocks[~file.checked[blocks]]
    if not file.is_changed():
        file.found(new, file.wrong_blocks(new))


def _advise(file: ShardFile, blocks: Array, block_size: int) -> None:
    """Let the kernel read ascending blocks ahead; adjacent blocks form one range."""
    if not len(blocks):
        return
    runs = np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1)
    starts = np.array([run[0] * block_size for run in runs])
    stops = np.array([(run[-1] + 1) * block_size for run in runs])
    for begins, ends in file.extents(starts, np.minimum(stops, file.shard.num_samples)):
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            for at in range(begin, end, _REQUEST_BYTES):
                size = min(_REQUEST_BYTES, end - at)
                os.posix_fadvise(file.descriptor, at, size, os.POSIX_FADV_WILLNEED)
