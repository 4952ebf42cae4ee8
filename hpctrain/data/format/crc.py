"""The crc32 of a whole from the crc32 of its pieces, so that pieces are read side by side."""

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1: crc32 keeps the coefficient of x^0 in the highest bit."""


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the crc32 of two runs of bytes, one after the other.

    Args:
        first: crc32 of the first run.
        second: crc32 of the second run.
        second_bytes: length of the second run.

    Source: zlib's ``crc32_combine``: behind n bytes, the first crc32 is multiplied by x^(8n).
    """
    return _times(_shift(second_bytes), first) ^ second


@lru_cache(maxsize=1024)
def _shift(num_bytes: int) -> int:
    """Return x^(8 * num_bytes), by repeated squaring."""
    power, factor = _ONE, _ONE >> 8
    while num_bytes:
        if num_bytes & 1:
            power = _times(factor, power)
        factor = _times(factor, factor)
        num_bytes >>= 1
    return power


def _times(a: int, b: int) -> int:
    """Multiply two polynomials over GF(2), modulo that of crc32."""
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product
