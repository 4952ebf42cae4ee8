"""Calls of ``kernel.c``, the compiled kernel that sums in node memory.

The kernel follows the protocol of ``shared_memory``, with bitwise identical results. Without the
kernel, ``shared_memory`` executes the protocol in Python.
"""

import ctypes
import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from hpctrain.core import config

_LOG = logging.getLogger(__name__)
_FILE = Path(__file__).with_name("libkernel.so")

DONE, LATE, DIFFERENT, FAILED = range(4)
"""Results of a call: complete; other ranks are late; the ranks' calls differ; a rank has
failed."""

_INSTANT_NUMEL = 1 << 12  # a sum of up to this many elements is shorter than a switch of threads

BUCKET, DIRECT, SLICES = range(1, 4)
"""Kinds of sums: buckets; values that every rank sums; values of which every rank sums a slice."""

Sum = Callable[[int, int, Any], int]
"""A prepared sum; the method that returns such a function documents its arguments."""


class ReductionStruct(ctypes.Structure):
    """Arguments of a prepared sum; passing them to C one by one would take longer than the sum."""

    _fields_ = (
        ("call", ctypes.c_int64),  # the number that ranks compare
        ("numel", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),  # the ``kernel_number`` of a combination
        ("is_scaled", ctypes.c_int32),
    )


class Library:
    """Compiled kernel; functions in ``calls`` release the GIL, functions in ``instant`` keep it.

    Args:
        file: the compiled library.

    Raises:
        OSError: the library is missing, or was compiled from another source.
    """

    def __init__(self, file: Path) -> None:
        self.calls, self.instant = ctypes.CDLL(str(file)), ctypes.PyDLL(str(file))
        source = file.with_name("kernel.c").read_bytes()
        self.calls.hpctrain_checksum.restype = ctypes.c_uint32
        if self.calls.hpctrain_checksum() != zlib.crc32(source):
            raise OSError(f"{file} was compiled from another kernel.c; install hpctrain again")
        address, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        wide, real = ctypes.c_int64, ctypes.c_double
        for library in (self.calls, self.instant):
            library.hpctrain_node_bytes.restype = size
            library.hpctrain_prepare.argtypes = [
                *(address, number, number, real, real, size, address)
            ]
            library.hpctrain_barrier.argtypes = [address]
            library.hpctrain_resume.argtypes = [address, real]
            library.hpctrain_sum.argtypes = [address, address, number, number, address]
            library.hpctrain_use_words.argtypes = [address, address, number, address]
            library.hpctrain_commit.argtypes = [address, address, wide, number, address]
        text = ctypes.c_char_p
        self.calls.hpctrain_report_crashes.argtypes = [number, text, text]
        self.calls.hpctrain_report_crashes.restype = None


@cache
def library() -> Library | None:
    """Load the kernel; return None if it is missing or broken, with a warning if broken."""
    try:
        return Library(_FILE) if _FILE.exists() else None
    except OSError as error:
        _LOG.warning("sums within a node are slower, without the compiled kernel: %s", error)
        return None


def why_off(environ: Mapping[str, str] = os.environ) -> str:
    """Return why sums within a node run without the kernel; empty if they run with it."""
    if config.setting("kernel", environ) == "off":
        return "HPCTRAIN_KERNEL=off"
    return "" if library() is not None else "hpctrain was installed without a C compiler"


class Kernel:
    """State of the kernel for one rank of a node; one thread at a time may use it.

    Args:
        library: the compiled functions.
        rank: local rank.
        size: number of ranks of the node.
        phases_s: seconds for which a call spins, and then yields the core, before it returns
            ``LATE``.
        addresses: addresses of these objects, in order: the cells in which ranks store call
            numbers; the sign, a word that is set after a failure; the slots of each rank; and, for
            each round of a barrier, the semaphore to wait for and the semaphore to post.
        slot_bytes: size of a slot.
    """

    def __init__(
        self,
        library: Library,
        rank: int,
        size: int,
        phases_s: tuple[float, float],
        addresses: Sequence[int],
        slot_bytes: int,
    ) -> None:
        calls, instant = library.calls, library.instant
        state = (ctypes.c_int64 * -(-calls.hpctrain_node_bytes() // 8))()
        self._state = ctypes.byref(state)
        given = (ctypes.c_int64 * len(addresses))(*addresses)
        self.code: int = calls.hpctrain_prepare(
            self._state, rank, size, *phases_s, slot_bytes, given
        )
        """Result of the last call; at first ``DONE``, or ``FAILED`` with too many ranks."""
        self._barrier, self._resume = instant.hpctrain_barrier, calls.hpctrain_resume
        self._sums = instant.hpctrain_sum, calls.hpctrain_sum
        self._use_words = calls.hpctrain_use_words
        self._commits = instant.hpctrain_commit, calls.hpctrain_commit

    def barrier(self) -> int:
        """Begin a barrier; return the result, such as ``DONE``."""
        return int(self._barrier(self._state))

    def sum_of(self, kind: int, call: int, dtype: int, numel: int, scale: float | None) -> Sum:
        """Return a function that begins a sum in place and returns the result, such as ``DONE``.

        The arguments of the function are the turn, 0 or 1, see ``SharedMemory``; whether sums that
        are not finite are counted; and the address of the contiguous values or, for ``BUCKET``, of
        an array with the address of the bucket of each rank.

        Args:
            kind: ``BUCKET``, ``DIRECT`` or ``SLICES``.
            call: number that ranks compare before the sum.
            dtype: the ``kernel_number`` of a combination.
            numel: number of elements.
            scale: factor of the sum, or None.
        """
        what = ReductionStruct(call, numel, scale or 0.0, kind, dtype, scale is not None)
        function = self._sums[numel > _INSTANT_NUMEL]
        return partial(function, self._state, ctypes.byref(what))  # which keeps ``what``

    def use_words(self, words: int, bells: Sequence[int]) -> None:
        """Set the memory that functions returned by ``commit_of`` use.

        Args:
            words: address of the words of the node.
            bells: addresses of the semaphores of this rank, of rank 0, and of the children of this
                rank.
        """
        given = (ctypes.c_int64 * len(bells))(*bells)
        self._use_words(self._state, words, len(bells), given)

    def commit_of(self, dtype: int, numel: int, scale: float | None) -> Sum:
        """Return a function that sums values in place, if all ranks have prepared the sum.

        The arguments of the function are the word of this rank, the turn, and the address of the
        values, which fit a slot. The function returns ``DONE``; ``LATE`` if the sum remains
        prepared, because another rank is late; or ``DIFFERENT`` if it is aborted.
        """
        what = ReductionStruct(0, numel, scale or 0.0, DIRECT, dtype, scale is not None)
        function = self._commits[numel > _INSTANT_NUMEL]
        return partial(function, self._state, ctypes.byref(what))

    def is_over(self, sleep_s: float = 0.0) -> bool:
        """Continue a call that has returned ``LATE``; return whether the call is complete.

        The method first sleeps for at most ``sleep_s``. ``code`` is the result of the call.
        """
        self.code = self._resume(self._state, sleep_s)
        return self.code != LATE
