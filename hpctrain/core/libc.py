"""System calls that Python's standard library does not provide."""

import contextlib
import ctypes
import mmap
import os
import select
from functools import cache
from pathlib import Path
from typing import TypeAlias

Segment: TypeAlias = "ctypes.Array[ctypes.c_char]"  # bytes at a fixed address

_HERE = -100  # AT_FDCWD: paths are relative to the current directory
_EXCHANGE = 2
_SET_TIMER_SLACK = 29
_FAILED = ctypes.c_void_p(-1).value
_CLOCK_MONOTONIC = 1
_MAY_MOVE_TO = 3  # MREMAP_MAYMOVE and MREMAP_FIXED


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def libc() -> ctypes.CDLL:
    """Return the C library, with functions that release the GIL during a call."""
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = library.mremap.restype = address
    library.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    library.mremap.argtypes = [address, size, size, number, address]
    library.munmap.argtypes = [address, size]
    library.madvise.argtypes = [address, size, number]
    return library


@cache
def instant_libc() -> ctypes.PyDLL:
    """Return the C library, with functions that keep the GIL: faster for very short calls."""
    return ctypes.PyDLL(None, use_errno=True)


def map_memory(
    num_bytes: int,
    protection: int,
    flags: int,
    *,
    descriptor: int = -1,
    offset: int = 0,
    address: int | None = None,
) -> int:
    """Map memory or a file by ``mmap(2)``, and return the address.

    Unlike Python's ``mmap``, this function does not duplicate the descriptor. Raises ``OSError``
    if the system call fails.
    """
    found = libc().mmap(address, num_bytes, protection, flags, descriptor, offset)
    if found is None or found == _FAILED:
        raise _error()
    return int(found)


def move_memory(address: int, target: int, num_bytes: int) -> None:
    """Move mapped pages to another address. Raises ``OSError`` if the system call fails."""
    if libc().mremap(address, num_bytes, num_bytes, _MAY_MOVE_TO, target) == _FAILED:
        raise _error()


def unmap_memory(address: int, num_bytes: int) -> None:
    """Unmap pages by ``munmap(2)``."""
    libc().munmap(address, num_bytes)


def advise_memory(address: int, num_bytes: int, advice: int) -> int:
    """Call ``madvise(2)``; return the errno, 0 on success."""
    start = address - address % mmap.PAGESIZE
    refused = libc().madvise(start, address + num_bytes - start, advice)
    return ctypes.get_errno() if refused else 0


def trim_heap() -> None:
    """Return free memory of the heap to the operating system."""
    libc().malloc_trim(ctypes.c_size_t(0))


def memory_at(address: int, num_bytes: int) -> Segment:
    """Return a view of the bytes at an address; another object must keep the memory alive."""
    return (ctypes.c_char * num_bytes).from_address(address)


def read_memory(pid: int, address: int, num_bytes: int) -> bytes:
    """Copy memory of another process by ``process_vm_readv(2)``.

    Raises ``OSError`` if the system call fails or copies fewer than ``num_bytes`` bytes.
    """
    target = ctypes.create_string_buffer(num_bytes)
    here, there = (_Span(start, num_bytes) for start in (ctypes.addressof(target), address))
    if libc().process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != num_bytes:
        raise _error()
    return target.raw


def exchange_names(a: Path, b: Path) -> bool:
    """Exchange two file names atomically; return False if the file system cannot."""
    paths = (_HERE, os.fsencode(a), _HERE, os.fsencode(b), ctypes.c_uint(_EXCHANGE))
    return bool(libc().renameat2(*paths) == 0)


def file_system_magic(descriptor: int) -> int:
    """Return the number by which ``fstatfs(2)`` identifies a file system type; 0 on failure."""
    # struct statfs begins with f_type, a long, and has fewer than 1024 bytes on every machine.
    record = ctypes.create_string_buffer(1024)
    if libc().fstatfs(descriptor, record):
        return 0
    return ctypes.c_ulong.from_buffer(record).value & 0xFFFFFFFF


def sharpen_sleep() -> None:
    """Set the timer slack of this thread, and of threads that it starts later, to 1 ns.

    By default the kernel adds up to 50 us to every sleep, which is as long as a small message
    takes.
    """
    libc().prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1), 0, 0, 0)  # 1 ns; 0 would select the default


class Timer:
    """Timer that one thread sets while another thread sleeps until the timer expires."""

    __slots__ = ("_descriptor", "_poll", "_set")

    def __init__(self) -> None:
        """Create a timer that is not set. Raises ``OSError`` if too many files are open."""
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor: int = libc().timerfd_create(_CLOCK_MONOTONIC, flags)
        if self._descriptor < 0:
            raise _error()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._set = instant_libc().timerfd_settime

    def set(self, seconds: float) -> None:
        """Make the timer expire after ``seconds``, never if 0. An earlier setting is replaced."""
        nanoseconds = int(seconds * 1e9)
        when = (ctypes.c_long * 4)(0, 0, *divmod(nanoseconds, 1_000_000_000))
        self._set(self._descriptor, 0, when, None)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the timer expires or ``timeout_s`` has passed; return whether it expired."""
        went_off = bool(self._poll.poll(timeout_s * 1e3))
        if went_off:
            with contextlib.suppress(BlockingIOError):  # another thread has set the timer again
                os.read(self._descriptor, 8)
        return went_off

    def close(self) -> None:
        """Close the descriptor. The caller ensures that no thread waits for the timer."""
        os.close(self._descriptor)


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
