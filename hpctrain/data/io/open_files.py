"""Open files of a data set in one process, with their threads and memory."""

import mmap
import os
import resource
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import gcd, lcm, prod
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.cluster.resources import available_bytes
from hpctrain.core.errors import DataError
from hpctrain.core.python_compat import Self
from hpctrain.core.units import KIB, MIB
from hpctrain.data.format.dataset_manifest import Manifest
from hpctrain.data.format.hdf5_values import UNREADABLE
from hpctrain.data.io.mapped import HUGE_BYTES, Space
from hpctrain.data.io.shardfile import IO, OpenShard, ShardFile
from hpctrain.data.io.values import Array, take_rows

_ROOM = 2  # this multiple of the size of a data set must be free before all of it is mapped unseen


Opener = Callable[..., OpenShard]  # opens a shard, with the arguments of ``OpenShard``; picklable


class Handles:
    """Shards opened at first use; those used longest ago are closed when there are too many."""

    def __init__(self, manifest: Manifest, open_shard: Callable[..., OpenShard], io: IO) -> None:
        self.pid = os.getpid()
        self.buffers = BatchBuffers()
        self.joined: JoinedMap | None = None
        self._manifest = manifest
        self._open_shard = open_shard
        self._shards: OrderedDict[int, OpenShard] = OrderedDict()
        # HDF5 needs another descriptor, and the program some as well.
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

    def rows_of(self, wanted: Array) -> tuple["JoinedMap", Array] | None:
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
        """Begin to bring rows of shards into memory, in separate threads."""
        for home, rows, _ in parts:
            # Errors of a shard are raised where samples are taken from it.
            with suppress(DataError, *UNREADABLE):
                read_ahead(self._threads, self.shard(home).file, rows, check=check)

    def _join(self) -> "JoinedMap | None":
        """Join all shards to one array, once all are open and if they can be joined."""
        if not self._can_join or len(self._shards) < len(self._manifest.shards):
            return None
        with self._lock:
            if self.joined is None:
                files = [self._shards[index].file for index in range(len(self._shards))]
                self.joined = JoinedMap.of(self._manifest, files)
                self._can_join = self.joined is not None
            return self.joined


_MAX_MAPPED_BYTES = 1 << 45
_FEW = 4
_SMALL_BYTES = 64 * KIB


class JoinedMap:
    """The fields that are neither ragged nor filtered, of shards that are mapped."""

    def __init__(self, manifest: Manifest, files: Sequence[ShardFile], slot: int) -> None:
        """Map the files once more, one behind another; ``of`` does it where it can be done."""
        self._files = tuple(files)
        self._block_size = manifest.block_size
        counts = [file.shard.num_samples for file in files]
        self._starts = np.cumsum([0, *counts[:-1]])
        self._shift = np.arange(len(files)) * slot - self._starts
        # Dividing is cheaper than searching; all shards but the last are equal as a rule.
        is_even = len(set(counts[:-1])) < 2 and max(counts) == counts[0]
        self._per_shard = counts[0] if is_even else 0
        self._arrays = {
            name: _joined(manifest, files, name, slot)
            for name, field in manifest.fields.items()
            if not field.ragged
        }
        self._checked = np.zeros(-(-len(files) * slot // self._block_size), bool)
        for number, file in enumerate(files):
            first = number * slot // self._block_size
            flags = self._checked[first : first + len(file.checked)]
            flags[:] = file.checked
            file.checked = flags
        self._all_checked = False
        self._turn = 0

    @classmethod
    def of(cls, manifest: Manifest, files: Sequence[ShardFile]) -> Self | None:
        """Join files, None where one of them is not mapped or cannot be placed."""
        fields = {name: field for name, field in manifest.fields.items() if not field.ragged}
        is_plain = not any(field.compression for field in fields.values())
        if not is_plain or not all(file.is_mapped for file in files):
            return None
        most = max(file.shard.num_samples for file in files)
        is_copied = {name: _is_copied(manifest, files[0], name, most) for name in fields}
        sizes = [field.sample_bytes for name, field in fields.items() if not is_copied[name]]
        for page in (HUGE_BYTES, mmap.PAGESIZE):
            # Rows after which every field, and every block, begins on such a page.
            step = lcm(manifest.block_size, *(page // gcd(page, size) for size in sizes))
            slot = -(-most // step) * step
            if sum(sizes) * slot * len(files) <= _MAX_MAPPED_BYTES:
                # Too few addresses, too little memory, or bytes that begin on no page.
                with suppress(OSError, ValueError, MemoryError):
                    return cls(manifest, files, slot)
        return None

    def is_in_memory(self, *, fits: bool) -> bool:
        """Return whether every file was in memory when it was opened, or has come there since.

        ``fits`` means that checked blocks stay there.
        """
        return all(file.was_cached or (fits and file.all_checked) for file in self._files)

    def rows_of(self, wanted: Array) -> Array | None:
        """Return the rows of samples, None if a file of theirs has changed."""
        if len(self._files) == 1:
            return wanted if self._is_current(self._files) else None
        if self._per_shard:
            homes = wanted // self._per_shard
        else:
            homes = np.searchsorted(self._starts, wanted, side="right") - 1
        files = (
            self._files
            if len(self._files) <= _FEW
            else [self._files[home] for home in set(homes.tolist())]
        )
        if not self._is_current(files):
            return None
        rows: Array = wanted + self._shift[homes]
        return rows

    def is_checked(self, rows: Array) -> bool:
        """Return whether the crc32 of all blocks of these rows was right."""
        if not self._all_checked:
            self._all_checked = all(file.all_checked for file in self._files)
        return self._all_checked or bool(self._checked[rows // self._block_size].all())

    def take(self, name: str, rows: Array, out: NDArray[Any]) -> None:
        """Copy rows of a field to ``out``."""
        take_rows(self._arrays[name], rows, out)

    def _is_current(self, files: Sequence[ShardFile]) -> bool:
        # A file that became shorter must not be touched; asking for its size is cheap. Whether
        # it was written to is checked for one file at a time.
        for file in files:
            num_bytes = os.lseek(file.descriptor, 0, os.SEEK_END)
            if file.is_replaced or num_bytes != file.shard.num_bytes:
                return False
        if not files:
            return True
        self._turn = turn = (self._turn + 1) % len(files)
        return not files[turn].is_changed()


def _joined(manifest: Manifest, files: Sequence[ShardFile], name: str, slot: int) -> NDArray[Any]:
    field = manifest.fields[name]
    shape = (len(files) * slot, *field.shape)
    most = max(file.shard.num_samples for file in files)
    if _is_copied(manifest, files[0], name, most):
        array = np.empty(shape, field.dtype)
        for number, file in enumerate(files):
            count = file.shard.num_samples
            array[number * slot : number * slot + count] = file.values[name].between(0, count)
        return array
    space = Space(shape, field.dtype, files[0].shard.places[name].offset or 0)
    for number, file in enumerate(files):
        if (offset := file.shard.places[name].offset) is None:
            raise ValueError("only HDF5 can read it")
        num_bytes = file.shard.num_samples * field.sample_bytes
        space.map_file(number * slot * field.sample_bytes, file.descriptor, offset, num_bytes)
    return space.array()


def _is_copied(manifest: Manifest, file: ShardFile, name: str, most: int) -> bool:
    # Less than a page is aligned to nothing in a shard.
    small = manifest.fields[name].sample_bytes * most <= _SMALL_BYTES
    return small or file.is_kept(name)


_FRESH_BYTES = 64 * KIB
_MAX_PER_SIZE = 16
_MAX_SIZES = 8


class BatchBuffers:
    """Uninitialised arrays whose memory is used again: page faults cost more than a batch's copy.

    A view, a tensor of ``torch.from_numpy`` and whatever shares memory with one keep a buffer
    from being handed out again. Several threads may call it at once.
    """

    def __init__(self) -> None:
        self._free: OrderedDict[int, list[NDArray[np.uint8]]] = OrderedDict()

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array to be filled; small ones are always new."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < _FRESH_BYTES:
            return np.empty(shape, dtype)
        # Sizes are rounded up by an eighth at most, so that ragged batches share buffers.
        step = 1 << (num_bytes.bit_length() - 4)
        size = -(-num_bytes // step) * step
        try:
            # The one that became free last is the likeliest to be in a cache.
            memory = self._free[size].pop()
        except (KeyError, IndexError):
            memory = _fresh(size)
        # Not an array's view but a buffer's: all views of it refer to it, not to the memory.
        whole = np.frombuffer(memory.data, np.uint8)
        weakref.finalize(whole, self._take_back, memory).atexit = False
        return whole[:num_bytes].view(dtype).reshape(shape)

    def _take_back(self, memory: NDArray[np.uint8]) -> None:
        free = self._free.setdefault(len(memory), [])
        if len(free) < _MAX_PER_SIZE:
            free.append(memory)
        if len(self._free) > _MAX_SIZES:
            with suppress(KeyError):
                self._free.popitem(last=False)


def _fresh(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory in large pages where the system has them: a batch fills them sooner."""
    if num_bytes < HUGE_BYTES:
        return np.empty(num_bytes, np.uint8)
    memory = mmap.mmap(-1, num_bytes + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_BYTES
    return whole[start : start + num_bytes]


THREADS = 4  # while one checks its blocks, others keep the disk busy
_PIECE_BYTES = 4 * MIB  # of blocks that one thread reads in a row
_REQUEST_BYTES = 128 * KIB
"""Linux reads no more than its read-ahead window for one request, 128 KiB unless it was set."""
_GAP_BYTES = 16 * KIB


def read_ahead(threads: Executor, file: ShardFile, rows: Array, *, check: bool) -> None:
    """Let threads bring rows of a file into memory, in its order, and return at once.

    ``check`` brings the whole of their blocks, and checks the new ones; readers wait for them by
    ``ShardFile.wait_for``, and raise the errors.
    """
    if file.was_cached or not len(rows):
        return
    if not check:
        threads.submit(_advise, file, *runs_of(distinct(rows)))
        return
    blocks = distinct(rows // file.block_size)
    is_new = ~file.checked[blocks]
    threads.submit(_advise_blocks, file, blocks[~is_new])
    new, shard = blocks[is_new], file.shard
    block_bytes = max(1, file.block_size * shard.num_bytes // shard.num_samples)
    num_pieces = min(len(new), -(-len(new) * block_bytes // _PIECE_BYTES))
    for piece in np.array_split(new, num_pieces) if num_pieces else []:
        future = threads.submit(_bring, file, piece)
        file.coming.update(dict.fromkeys(piece.tolist(), future))
        future.add_done_callback(partial(_arrived, file, piece.tolist()))


def _bring(file: ShardFile, blocks: Array) -> None:
    """Read and check blocks, unless that was done; damaged blocks stay unchecked.

    So does a file that was changed: to touch pages that a map has lost ends the process.
    """
    # Advice reads small pages, which a map then takes one by one.
    if not file.is_mapped:
        _advise_blocks(file, blocks)
    new = blocks[~file.checked[blocks]]
    if not file.is_changed():
        file.found(new, file.wrong_blocks(new))


def runs_of(numbers: Array) -> tuple[Array, Array]:
    """Return the starts and stops of the runs of consecutive numbers, which grow."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = numbers[np.concatenate(([0], cuts))]
    stops = numbers[np.concatenate((cuts, [len(numbers)])) - 1] + 1
    return starts, stops


def distinct(numbers: Array) -> Array:
    """Return each number once, in order: what ``np.unique`` does, fast where they grow."""
    steps = np.diff(numbers)
    if (steps < 0).any():
        return np.unique(numbers)
    return numbers[np.concatenate(([True], steps > 0))]


def _arrived(file: ShardFile, blocks: list[int], future: Future[None]) -> None:
    for block in blocks:
        if file.coming.get(block) is future:
            file.coming.pop(block, None)


def _advise_blocks(file: ShardFile, blocks: Array) -> None:
    """Ask the disk for blocks, which grow, maybe none."""
    if len(blocks):
        starts, stops = runs_of(blocks)
        size = file.block_size
        _advise(file, starts * size, np.minimum(stops * size, file.shard.num_samples))


def _advise(file: ShardFile, starts: Array, stops: Array) -> None:
    """Ask the disk for the samples ``[starts[i], stops[i])``, which grow, all at the same time."""
    for begins, ends in file.extents(starts, stops):
        start = stop = 0
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if begin > stop + _GAP_BYTES:
                _request(file.descriptor, start, stop)
                start = begin
            stop = max(stop, end)
        _request(file.descriptor, start, stop)


def _request(descriptor: int, start: int, stop: int) -> None:
    for piece in range(start, stop, _REQUEST_BYTES):
        size = min(_REQUEST_BYTES, stop - piece)
        os.posix_fadvise(descriptor, piece, size, os.POSIX_FADV_WILLNEED)
