"""Tell a finished shard its place in the data set, once it is known."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import h5py

from hpctrain.core.atomic import sync
from hpctrain.core.checksum import crc32
from hpctrain.core.units import KIB
from hpctrain.data.format.crc import combine
from hpctrain.data.format.layout import ShardEntry
from hpctrain.data.format.storage import PartFile

_HEAD_BYTES = 64 * KIB


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
