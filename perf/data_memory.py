"""Memory of files and methods: the page cache of files, the peak of an epoch."""

import ctypes
import gc
import mmap
import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
from data_methods import Method

COLD = 0.01
"""Part of the bytes of a file that may be in memory where it counts as not cached."""
READ_BYTES = 8 << 20
MOST_OF_FREE = 0.8

_WATCH_S = 0.01
_LIMIT_S = 60
_LIBC = ctypes.CDLL(None, use_errno=True)


def evict(path: Path) -> bool:
    """Drop a file, or all files of a folder, from the page cache; return True on success."""
    for file in files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return resident(path) < COLD


def resident(path: Path) -> float:
    """Return the fraction of a file, or of the files of a folder, in the page cache."""
    num_pages = num_here = 0
    for file in files(path):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as m:
            here = np.zeros(-(-len(m) // mmap.PAGESIZE), np.uint8)
            bytes_of_file = np.frombuffer(m, np.uint8)
            address = ctypes.c_void_p(bytes_of_file.ctypes.data)
            del bytes_of_file
            if _LIBC.mincore(address, ctypes.c_size_t(len(m)), ctypes.c_void_p(here.ctypes.data)):
                raise OSError(ctypes.get_errno(), "mincore failed", str(file))
            num_pages += len(here)
            num_here += int((here & 1).sum())
    return num_here / max(num_pages, 1)


def touch_free_memory(num_bytes: int, keep_s: float) -> None:
    """Allocate and touch free memory, keep it for ``keep_s`` seconds, and free it.

    A virtual machine returns free memory to its host, and the next allocation waits for the host,
    for half a second per GB and more. After this call, allocations do not wait. At most
    ``MOST_OF_FREE`` of the available memory is touched.
    """
    num_bytes = min(num_bytes, int(MOST_OF_FREE * psutil.virtual_memory().available))
    with mmap.mmap(-1, num_bytes) as memory:
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        pages[:] = 1
        time.sleep(keep_s)
        del pages


def read_through(path: Path) -> int:
    """Read a file, or all files of a folder, in large pieces; return the number of bytes."""
    buffer = bytearray(READ_BYTES)
    num_bytes = 0
    for file in files(path):
        with file.open("rb", buffering=0) as opened:
            while some := opened.readinto(buffer):
                num_bytes += some
    return num_bytes


def files(path: Path) -> list[Path]:
    """Return a file, or all files of a folder that are not empty."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in found if file.is_file() and file.stat().st_size]


def file_system(path: Path) -> str:
    """Return the type of the file system of a folder, such as ``ext4``."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    of_path = [(Path(m[1]), m[2]) for m in mounts if path.resolve().is_relative_to(m[1])]
    return max(of_path, key=lambda found: len(found[0].parts))[1]


def peak_bytes(method: Method, limit_s: float) -> int | None:
    """Return the peak memory of epochs in a separate process, in bytes.

    The sum contains anonymous and shared memory that the process and its children allocate, and
    not the page cache, which all methods fill with the same files. Returns None if an epoch
    failed.
    """
    gc.collect()
    _LIBC.malloc_trim(0)  # otherwise the child inherits freed memory of this process
    child = multiprocessing.get_context("fork").Process(target=_read, args=(method, limit_s))
    begin = _anonymous(os.getpid())
    child.start()
    assert child.pid
    peak, deadline = 0, time.perf_counter() + _LIMIT_S
    while child.is_alive() and time.perf_counter() < deadline:
        peak = max(peak, sum(_beyond(pid, begin) for pid in _family(child.pid)))
        child.join(_WATCH_S)
    if child.exitcode is None:
        child.kill()
        child.join()
    return peak if child.exitcode == 0 else None


def _read(method: Method, limit_s: float) -> None:
    end = time.perf_counter() + limit_s
    while (
        time.perf_counter() < end
    ):  # also if an epoch is shorter than the interval of measurements
        method.prepare()
        with closing(method.epoch()) as batches:
            for _ in batches:
                if time.perf_counter() > end:
                    break
    method.close()


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        yield from (child.pid for child in psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return


def _beyond(pid: int, begin: int) -> int:
    try:
        return max(_anonymous(pid) - begin, 0) + _number(pid, "smaps_rollup", "Pss_Shmem")
    except OSError:  # it has just ended
        return 0


def _anonymous(pid: int) -> int:
    return _number(pid, "status", "RssAnon")


def _number(pid: int, file: str, name: str) -> int:
    found = re.search(
        rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE
    )
    return int(found[1]) * 1024 if found else 0
