"""Memory that several processes map, and semaphores in it: calls of libc.

Python's own ``mmap`` keeps a duplicate of the descriptor for each map. With 128 ranks on a node
that map each other's buckets, the usual limit of 1024 open files would be reached by eight.
"""

import ctypes
import mmap
import time
import weakref

from hpctrain.core.errors import NodeMemoryError
from hpctrain.core.libc import (
    Segment,
    instant_libc,
    libc,
    map_memory,
    memory_at,
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
