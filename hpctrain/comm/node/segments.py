"""Memory that several processes map, and semaphores in it: the door to libc.

Python's own ``mmap`` keeps a duplicate of the descriptor for each map. With 128 ranks on a node
that map each other's buckets, the usual limit of 1024 open files would be reached by eight.
"""

import ctypes
import errno
import mmap
import os
import time
from typing import TypeAlias

from hpctrain.core.errors import NodeMemoryError

Segment: TypeAlias = "ctypes.Array[ctypes.c_char]"
"""Bytes at a fixed address; what is made from it keeps it, and it keeps its map."""

LINE_BYTES = 64
"""Room for one semaphore, which takes 32 bytes: a cache line each avoids false sharing."""

_POPULATE_WRITE = 23
_FAILED = ctypes.c_void_p(-1).value


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_LIBC = ctypes.CDLL(None, use_errno=True)  # gives up Python's lock during a call
_INSTANT = ctypes.PyDLL(None)  # keeps it: these calls take less time than giving it up
for _library, _name, _arguments in (
    (_LIBC, "mmap", [_POINTER, _SIZE, _INT, _INT, _INT, ctypes.c_long]),
    (_LIBC, "munmap", [_POINTER, _SIZE]),
    (_LIBC, "madvise", [_POINTER, _SIZE, _INT]),
    (_LIBC, "sem_timedwait", [_POINTER, ctypes.POINTER(_Timespec)]),
    (_LIBC, "sched_yield", []),
    (_INSTANT, "sem_init", [_POINTER, _INT, ctypes.c_uint]),
    (_INSTANT, "sem_post", [_POINTER]),
    (_INSTANT, "sem_trywait", [_POINTER]),
):
    getattr(_library, _name).argtypes = _arguments
_LIBC.mmap.restype = _POINTER
_POST, _TRY_WAIT = _INSTANT.sem_post, _INSTANT.sem_trywait


class _Map:
    """A map of the kernel, undone when nobody refers to it any more."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.num_bytes = 0
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.address = _LIBC.mmap(None, num_bytes, access, kind, descriptor, 0)
        if self.address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.num_bytes = num_bytes

    def __del__(self) -> None:
        if self.num_bytes:
            _LIBC.munmap(self.address, self.num_bytes)


def map_shared(descriptor: int, num_bytes: int) -> Segment:
    """Map a file's first bytes, shared and already in the page table; the file may be closed.

    Raises:
        OSError: the kernel refuses.
    """
    mapped = _Map(descriptor, num_bytes)
    segment = view_of(mapped.address, num_bytes)
    segment.keeps = mapped  # type: ignore[attr-defined]
    return segment


def view_of(address: int, num_bytes: int) -> Segment:
    """Look at memory that somebody else keeps."""
    return (ctypes.c_char * num_bytes).from_address(address)


def private(num_bytes: int) -> Segment:
    """Make zeros that no other process sees."""
    return (ctypes.c_char * num_bytes)()


def clear(segment: Segment) -> None:
    """Fill a segment with zeros."""
    ctypes.memset(segment, 0, len(segment))


def take_pages(segment: Segment) -> bool:
    """Take the pages of a map for writing; False where a store would be a SIGBUS.

    Kernels before 5.14 cannot say: True.
    """
    start = ctypes.addressof(segment)
    end, start = start + len(segment), start - start % mmap.PAGESIZE
    if _LIBC.madvise(start, end - start, _POPULATE_WRITE) == 0:
        return True
    return ctypes.get_errno() == errno.EINVAL


def yield_core() -> None:
    """Let others have the core, and other threads Python's lock, before going on."""
    _LIBC.sched_yield()


class Semaphore:
    """A counter in a segment that one process raises and another waits for."""

    __slots__ = ("_address", "_keeps")

    def __init__(self, segment: Segment, first_byte: int = 0) -> None:
        """Take 32 bytes of a segment, from a multiple of eight on."""
        self._address = _POINTER(ctypes.addressof(segment) + first_byte)
        self._keeps = segment

    def initialise(self) -> None:
        """Set the counter to zero; the owner calls this before anybody else uses it."""
        if _INSTANT.sem_init(self._address, 1, 0) != 0:
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
        return bool(_LIBC.sem_timedwait(self._address, ctypes.byref(deadline)) == 0)
