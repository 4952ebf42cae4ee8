"""The compiled kernel of node memory, ``kernel.c``, as functions."""

import ctypes
import logging
import os
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hpctrain.core import config

_LOG = logging.getLogger(__name__)
_FILE = Path(__file__).with_name("libkernel.so")


class Library:
    """The functions of the compiled kernel. ``instant`` ones keep Python's lock."""

    def __init__(self, file: Path) -> None:
        """Load the library. Raises ``OSError`` if it is missing or of another source."""
        self.calls, self.instant = ctypes.CDLL(str(file)), ctypes.PyDLL(str(file))
        source = file.with_name("kernel.c").read_bytes()
        self.calls.hpctrain_checksum.restype = ctypes.c_uint32
        if self.calls.hpctrain_checksum() != zlib.crc32(source):
            raise OSError(f"{file} was compiled from another kernel.c; install hpctrain again")
        address, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        wide, real = ctypes.c_int64, ctypes.c_double
        scaled: list[Any] = [number, address, size, real, number, number]
        for library in (self.calls, self.instant):
            library.hpctrain_node_bytes.restype = size
            library.hpctrain_prepare.argtypes = [
                *(address, number, number, real, real, size, address)
            ]
            library.hpctrain_barrier.argtypes = [address]
            library.hpctrain_resume.argtypes = [address, real]
            library.hpctrain_bucket.argtypes = [address, wide, number, *scaled]
            library.hpctrain_values.argtypes = [address, wide, number, *scaled]


@cache
def library() -> Library | None:
    """Return the kernel of this installation, or None without one; a broken one is a warning."""
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
