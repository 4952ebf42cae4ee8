"""Memory that several processes map, and semaphores in it, through libc.

``mmap.mmap`` keeps a duplicate of the file descriptor for each mapping. With 128 ranks per node
that map each other's buckets, eight buckets would exceed the usual limit of 1024 open files.
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
"""Space per semaphore, which has 32 bytes; separate cache lines avoid false sharing."""


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
    """Map the first bytes of a file as shared, prefaulted memory.

    The caller may close the file afterwards.

    The memory is unmapped when neither the segment nor an object created from it is referenced.

    Raises:
        OSError: the kernel cannot map the file.
    """
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
    address = map_memory(num_bytes, access, kind, descriptor=descriptor)
    segment = memory_at(address, num_bytes)
    # Not at interpreter exit: other finalizers and threads may still use the memory.
    weakref.finalize(segment, unmap_memory, address, num_bytes).atexit = False
    return segment


_FIXED, _NO_RESERVE = 0x10, 0x4000  # flags of mmap(2) that Python does not define


class Region:
    """Memory of a node that every rank maps twice, shared and private.

    Args:
        shared: the shared mapping.
        private: the private mapping.
    """

    def __init__(self, shared: Segment, private: Segment) -> None:
        self.shared = shared  # all ranks see stores to this mapping
        self.private = private
        """The same memory, copy-on-write: a page to which this process has stored is private and
        no longer shows stores of other ranks."""
        self._kept: Segment | None = None  # contents of ``private`` at the last fork
        self._end: weakref.finalize[..., Segment] | None = None  # unmaps the copy

    def find_stores(self, first_page: int, num_pages: int) -> bool:
        """Return whether this process has stored to one of ``num_pages`` pages of ``private``."""
        kinds = np.zeros(num_pages, np.uint64)
        try:
            with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
                file.seek((ctypes.addressof(self.private) // mmap.PAGESIZE + first_page) * 8)
                file.readinto(kinds.data)
        except OSError:  # not available on this system
            return False
        kinds >>= np.uint64(61)  # the bits that remain: of a file, swapped, present
        return bool(((kinds > 1) & (kinds & np.uint64(1) == 0)).any())

    def forget_stores(self) -> None:
        """Drop private pages, so that all of ``private`` shows the shared memory again."""
        private = self.private
        refused = advise_memory(ctypes.addressof(private), len(private), mmap.MADV_DONTNEED)
        if refused:
            raise NodeMemoryError(f"cannot drop private pages: madvise failed with {refused}")

    def freeze_in_children(self) -> None:
        """Save the contents of ``private`` before each fork, for the child."""
        _frozen.regions.add(self)

    def keep(self) -> None:
        """Copy the contents of ``private``, unless the kept copy is equal."""
        shown = _words(self.private)
        if self._kept is None or not np.array_equal(_words(self._kept), shown):
            self.forget_kept()
            size, access = len(self.private), mmap.PROT_READ | mmap.PROT_WRITE
            address = map_memory(size, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._kept = memory_at(address, size)
            self._end = weakref.finalize(self._kept, unmap_memory, address, size)
            _words(self._kept)[:] = shown

    def forget_kept(self) -> None:
        """Free the saved contents in this process; forked children keep theirs."""
        self._kept = None

    def show_kept(self) -> None:
        """Replace ``private`` by the kept copy, at the same address. Called in a forked child."""
        if self._kept is not None and self._end is not None:
            self._end.detach()  # the address is unmapped by the move
            kept, private = map(ctypes.addressof, (self._kept, self.private))
            move_memory(kept, private, len(self.private))
            self._kept = None


def _words(segment: Segment) -> NDArray[np.uint64]:
    return np.frombuffer(memoryview(segment), np.uint64)


class _Frozen:
    """Regions that are copied before each fork, so that children keep their contents."""

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
    """Map the first ``num_bytes`` of each file, one after another, in one range of addresses.

    ``num_bytes`` must be a multiple of the page size.

    Raises:
        OSError: the kernel cannot map a file.
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
    """Yield the core to other threads and processes, and the GIL to other Python threads."""
    _YIELD()


class Semaphore:
    """A process-shared POSIX semaphore in a segment.

    Args:
        segment: memory of the semaphore, which has 32 bytes.
        first_byte: offset in the segment, a multiple of 8.
    """

    __slots__ = ("_address", "_keeps")

    def __init__(self, segment: Segment, first_byte: int = 0) -> None:
        self._address = _POINTER(ctypes.addressof(segment) + first_byte)
        self._keeps = segment

    @property
    def address(self) -> int:
        """Address of the semaphore in this process."""
        return self._address.value or 0

    def initialise(self) -> None:
        """Set the counter to zero. The owner must do so before other processes use the counter."""
        if _INIT(self._address, 1, 0) != 0:
            raise NodeMemoryError("this system has no process-shared semaphores")

    def post(self) -> None:
        """Increment the counter and wake one waiter."""
        _POST(self._address)

    def try_wait(self) -> bool:
        """Decrement the counter if it is positive; return True if it was positive."""
        return bool(_TRY_WAIT(self._address) == 0)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the counter is positive and decrement it; return False on timeout."""
        nanoseconds, one_second = time.time_ns() + int(timeout_s * 1e9), 1_000_000_000
        deadline = _Timespec(*divmod(nanoseconds, one_second))
        return bool(_TIMED_WAIT(self._address, ctypes.byref(deadline)) == 0)


STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")
"""Whether loads are not reordered with loads, nor stores with stores, as on x86."""

Fence = Callable[[], object] | None  # None where the processor needs none


def fence_of(semaphore: Semaphore) -> Fence:
    """Return a function that is a memory fence; None if the processor needs none.

    Posting ``semaphore`` is a release and decrementing it an acquire. No other code may use the
    semaphore.
    """
    if STORES_IN_ORDER:
        return None

    def fence() -> None:
        semaphore.post()
        semaphore.try_wait()

    return fence
