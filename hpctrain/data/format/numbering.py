"""Tell a finished shard its place in the data set, once it is known."""

from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import h5py

from hpctrain.core.atomic import sync
from hpctrain.core.checksum import crc32
from hpctrain.core.units import KIB
from hpctrain.data.format.layout import ShardEntry
from hpctrain.data.format.storage import PartFile

_HEAD_BYTES = 64 * KIB
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1: crc32 keeps the coefficient of x^0 in the highest bit."""


def number(path: Path, shard: ShardEntry, *, index: int, first_index: int) -> ShardEntry:
    """Write the place of a shard into its attributes, which lie in its first bytes.

    Args:
        path: of the file; on disk when this returns.
        shard: what is known of it.
        index: number of the shard in the data set.
        first_index: index of its first sample in the data set.

    Returns:
        The shard with its new crc32, for which the bytes behind the attributes are not read.
    """
    before = _head(path)
    with closing(PartFile(path, "r+b")) as storage:
        with h5py.File(storage, "r+", libver=("earliest", "v110"), locking=False) as file:
            file.attrs.modify("shard", index)
            file.attrs.modify("first_index", first_index)
        storage.check()
    sync(path)
    rest_bytes = shard.num_bytes - len(before)
    rest = shard.crc32 ^ combine(crc32(before), 0, rest_bytes)
    return replace(shard, crc32=combine(crc32(_head(path)), rest, rest_bytes))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


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
