"""Files as memory at chosen addresses, so that many files can look like one array."""

import ctypes
import mmap
import os
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.io.largepages import HUGE_BYTES

PAGE_BYTES = mmap.PAGESIZE

_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22


class Space:
    """A range of addresses into which files are mapped, for reading.

    Arrays keep it alive; with the last of them it is unmapped. Whoever reads where nothing is
    mapped, or behind the end of a file that became shorter, ends the process (SIGBUS): look at
    the size of the file before.
    """

    def __init__(self, num_bytes: int, offset: int = 0) -> None:
        """Reserve addresses; no memory.

        Args:
            num_bytes: size of the space.
            offset: in a file, of what will be at its start, for large pages.

        Raises:
            OSError: there are not so many, for instance by ``ulimit -v``.
        """
        self._num_bytes = _up(max(num_bytes, 1))
        self._num_reserved = self._num_bytes + HUGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._reserved = _map(None, self._num_reserved, 0, flags, -1, 0)
        page = offset // PAGE_BYTES * PAGE_BYTES
        self._start = self._reserved + (page - self._reserved) % HUGE_BYTES

    def map_file(self, place: int, descriptor: int, offset: int, num_bytes: int) -> None:
        """Show bytes of a file from ``place`` on.

        Args:
            place: where in this space, a multiple of the page size.
            descriptor: of the file; may be closed afterwards.
            offset: first byte in the file, a multiple of the page size.
            num_bytes: how many.

        Raises:
            OSError: the file system cannot map it.
        """
        assert place + num_bytes <= self._num_bytes
        address, flags = self._start + place, mmap.MAP_SHARED | _MAP_FIXED
        _map(address, num_bytes, mmap.PROT_READ, flags, descriptor, offset)
        # Only advice: not every kernel and file system can follow it.
        _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.MADV_HUGEPAGE)

    def bring(self, place: int, num_bytes: int) -> bool:
        """Read what is mapped there and wait for it; tell whether it is in memory now.

        It may not be where the disk fails, where the file has become shorter and before Linux
        5.14. Nothing is copied, and the system reads large pages around it where it has them:
        that takes a fifth of the processor's time of ``read``.
        """
        page = place // PAGE_BYTES * PAGE_BYTES
        address, size = self._start + page, place + num_bytes - page
        return not _libc().madvise(
            ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_READ
        )

    def put(self, place: int, data: bytes) -> None:
        """Hold a copy of ``data`` from ``place`` on, a multiple of the page size."""
        assert place + len(data) <= self._num_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _map(self._start + place, len(data), protection, flags, -1, 0)
        ctypes.memmove(address, data, len(data))

    def array(self, place: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Return the bytes from ``place`` on as a read-only array."""
        assert place + prod(shape) * np.dtype(dtype).itemsize <= self._num_bytes
        return np.asarray(View(self, self._start + place, shape, dtype))

    def __del__(self) -> None:
        """Give the addresses back."""
        if hasattr(self, "_reserved"):
            _libc().munmap(ctypes.c_void_p(self._reserved), ctypes.c_size_t(self._num_reserved))


class View:
    """What numpy asks for memory; an array made of it keeps the owner of the memory alive."""

    def __init__(
        self,
        owner: object,
        address: int,
        shape: tuple[int, ...],
        dtype: str,
        *,
        is_readonly: bool = True,
    ) -> None:
        """Show what lies at an address as long as ``owner`` lives; ``dtype`` as ``dtype.str``."""
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, is_readonly),
            "shape": shape,
            "typestr": dtype,
        }


def _up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    return libc


def _map(
    address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int, offset: int
) -> int:
    result = _libc().mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(num_bytes),
        protection,
        flags,
        descriptor,
        ctypes.c_long(offset),
    )
    if result is None or result == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(result)
