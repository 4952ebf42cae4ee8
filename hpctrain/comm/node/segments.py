"""Memory that several processes map, and semaphores in it: calls of libc.

Python's own ``mmap`` keeps a duplicate of the descriptor for each map. With 128 ranks on a node
that map each other's buckets, the usual limit of 1024 open files would be reached by eight.
"""

import ctypes
import mmap
import os
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import NodeMemoryError
from hpctrain.core.libc import (
    Segment,
    advise_memory,
    instant_libc,
    libc,
    map_memory,
    memory_at,
    move_memory,
    unmap_memory,
)

LINE_BYTES = 64
"""Room for one semaphore, which takes 32 bytes: a cache line each avoids false sharing."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_POINTER = ctypes.c_void_p
_INIT, _POST, _TRY_WAIT = (
    getattr(instant_libc(), name) for name in ("sem_init", "sem_post", "sem_trywait")
)
_INIT.argtypes, _POST.argtypes, _TRY_WAIT.argtypes = (
    [_POINTER, ctypes.c_int, ctypes.c_uint],
    [_POINTER],
    [_POINTER],
)
_TIMED_WAIT, _YIELD = libc().sem_timedwait, libc().sched_yield
_TIMED_WAIT.argtypes, _YIELD.argtypes = [_POINTER, ctypes.POINTER(_Timespec)], []


def map_shared(descriptor: int, num_bytes: int) -> Segment:
    """Map a file's first bytes, shared and already in the page table; the file may be closed.

    The map is undone when nobody refers to the segment, or what was made from it, any more.
    OSError if the kernel refuses.
    """
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
    address = map_memory(num_bytes, access, kind, descriptor=descriptor)
    segment = memory_at(address, num_bytes)
    # Not at the end of the process: others may still use the memory then.
    weakref.finalize(segment, unmap_memory, address, num_bytes).atexit = False
    return segment


_FIXED, _NO_RESERVE = 0x10, 0x4000  # flags of mmap(2) without a name in Python


class Region:
    """Memory that a node has once, mapped twice by every rank."""

    def __init__(self, shared: Segment, private: Segment) -> None:
        """Take the maps."""
        self.shared = shared  # what is stored here is seen by all ranks
        self.private = private
        """The same memory, but a page that is stored to here becomes this process's own, and no
        longer shows what others store."""
        self._kept: Segment | None = None  # what ``private`` held at the last fork
        self._end: weakref.finalize[..., Segment] | None = None  # of that copy

    def find_stores(self, first_page: int, num_pages: int) -> bool:
        """Say whether this process has stored to some pages of ``private``."""
        kinds = np.zeros(num_pages, np.uint64)
        try:
            with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
                file.seek((ctypes.addressof(self.private) // mmap.PAGESIZE + first_page) * 8)
                file.readinto(kinds.data)
        except OSError:  # this system does not tell
            return False
        kinds >>= np.uint64(61)  # present, swapped, of a file
        return bool(((kinds > 1) & (kinds & np.uint64(1) == 0)).any())

    def forget_stores(self) -> None:
        """Let ``private`` show what is shared again, everywhere."""
        private = self.private
        refused = advise_memory(ctypes.addressof(private), len(private), mmap.MADV_DONTNEED)
        if refused:
            raise NodeMemoryError(f"cannot drop private pages: madvise failed with {refused}")

    def freeze_in_children(self) -> None:
        """Let forked children go on to see what ``private`` shows when they are forked."""
        _frozen.regions.add(self)

    def keep(self) -> None:
        """Copy what ``private`` shows, unless a copy is the same; children share its pages."""
        shown = _words(self.private)
        if self._kept is None or not np.array_equal(_words(self._kept), shown):
            self.forget_kept()
            size, access = len(self.private), mmap.PROT_READ | mmap.PROT_WRITE
            address = map_memory(size, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._kept = memory_at(address, size)
            self._end = weakref.finalize(self._kept, unmap_memory, address, size)
            _words(self._kept)[:] = shown

    def forget_kept(self) -> None:
        """Drop the copy; children have it as long as they live."""
        self._kept = None

    def show_kept(self) -> None:
        """In a child: put the copy where ``private`` is."""
        if self._kept is not None and self._end is not None:
            self._end.detach()  # nothing is there any more
            kept, private = map(ctypes.addressof, (self._kept, self.private))
            move_memory(kept, private, len(self.private))
            self._kept = None


def _words(segment: Segment) -> NDArray[np.uint64]:
    return np.frombuffer(memoryview(segment), np.uint64)


class _Frozen:
    """Regions that children see as they were."""

    def __init__(self) -> None:
        self.regions = weakref.WeakSet[Region]()
        os.register_at_fork(before=self._keep, after_in_child=self._show)

    def _keep(self) -> None:
        for region in self.regions:
            region.keep()

    def _show(self) -> None:
        for region in self.regions:
            region.show_kept()


_frozen = _Frozen()


def map_in_a_row(descriptors: Sequence[int], num_bytes: int) -> Region:
    """Map the first bytes of files, a multiple of a page, one behind the other.

    OSError if the kernel refuses.
    """
    found = []
    for kind in (mmap.MAP_SHARED, mmap.MAP_PRIVATE | _NO_RESERVE):
        whole = num_bytes * len(descriptors)
        address = map_memory(whole, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        segment = memory_at(address, whole)
        weakref.finalize(segment, unmap_memory, address, whole).atexit = False
        access = mmap.PROT_READ | mmap.PROT_WRITE
        for place, one in enumerate(descriptors):
            at = address + place * num_bytes
            map_memory(num_bytes, access, kind | _FIXED, descriptor=one, address=at)
        found.append(segment)
    return Region(*found)


def yield_core() -> None:
    """Let others have the core, and other threads Python's lock, before going on."""
    _YIELD()


class Semaphore:
    """A counter in a segment that one process raises and another waits for."""

    __slots__ = ("_address", "_keeps")

    def __init__(self, segment: Segment, first_byte: int = 0) -> None:
        """Take 32 bytes of a segment, from a multiple of eight on."""
        self._address = _POINTER(ctypes.addressof(segment) + first_byte)
        self._keeps = segment

    def initialise(self) -> None:
        """Set the counter to zero; the owner calls this before anybody else uses it."""
        if _INIT(self._address, 1, 0) != 0:
            raise NodeMemoryError("this system has no process-shared semaphores")

    def post(self) -> None:
        """Add one, and wake a waiter."""
        _POST(self._address)

    def try_wait(self) -> bool:
        """Take one if there is one."""
        return bool(_TRY_WAIT(self._address) == 0)

    def wait(self, timeout_s: float) -> bool:
        """Sleep in the kernel until there is one and take it; False when the time is over."""
        nanoseconds, one_second = time.time_ns() + int(timeout_s * 1e9), 1_000_000_000
        deadline = _Timespec(*divmod(nanoseconds, one_second))
        return bool(_TIMED_WAIT(self._address, ctypes.byref(deadline)) == 0)


STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")
"""Whether all processors see the stores of one in order, and load in order."""

Fence = Callable[[], object] | None  # None where the processor needs none


def fence_of(semaphore: Semaphore) -> Fence:
    """Return a function that orders memory accesses; None where the processor does so itself.

    Loads and stores before its call stay before those after it: a post of the semaphore releases,
    taking it again acquires. No other code may use the semaphore.
    """
    if STORES_IN_ORDER:
        return None

    def fence() -> None:
        semaphore.post()
        semaphore.try_wait()

    return fence
