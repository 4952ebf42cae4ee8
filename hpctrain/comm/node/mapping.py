"""Memory maps that hold no file descriptor.

Python's ``mmap`` keeps a duplicate of the descriptor for each map. With 128 ranks on a node that
map each other's buckets, the usual limit of 1024 open files would be reached by eight buckets.
"""

import ctypes
import errno
import mmap
import os
from typing import TypeAlias

Segment: TypeAlias = "ctypes.Array[ctypes.c_char]"
"""Bytes at a fixed address; what is made from it keeps it, and it keeps its map."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_POPULATE_WRITE = 23
_FAILED = ctypes.c_void_p(-1).value


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


def take_pages(segment: Segment) -> bool:
    """Take the pages of a map for writing; False where a store would be a SIGBUS.

    Kernels before 5.14 cannot say: True.
    """
    start = ctypes.addressof(segment)
    end, start = start + len(segment), start - start % mmap.PAGESIZE
    if _LIBC.madvise(start, end - start, _POPULATE_WRITE) == 0:
        return True
    return ctypes.get_errno() == errno.EINVAL
