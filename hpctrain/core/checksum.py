"""The crc32 of bytes: the one of zlib, computed by the fastest library that is here.

ISA-L folds with carry-less multiplication: ten times the rate of zlib's tables, so that checking
data costs less than reading it. Where no wheel of it exists, zlib gives the same numbers.
"""

from collections.abc import Callable

crc32_combine: Callable[[int, int, int], int] | None = None
"""From the crc32 of two runs of bytes, and the length of the second, to that of both."""

try:
    from isal.isal_zlib import crc32, crc32_combine
except ImportError:
    from zlib import crc32

__all__ = ["crc32", "crc32_combine"]
