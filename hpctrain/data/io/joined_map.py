"""All shards of a data set as one array, where all lie in memory: one copy gathers a batch.

Each shard gets a slot of equally many rows in a range of addresses; between the last row of a
shard and the next slot nothing is mapped.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from math import gcd, lcm
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.units import KIB
from hpctrain.data.format.compression import is_compressed
from hpctrain.data.format.layout import Manifest
from hpctrain.data.io.largepages import HUGE_BYTES
from hpctrain.data.io.mapped import PAGE_BYTES, Space
from hpctrain.data.io.residency import in_memory
from hpctrain.data.io.shardfile import ShardFile
from hpctrain.data.io.values import Array, take_rows

_MOST_BYTES = 1 << 45
_FEW = 4
_SMALL_BYTES = 64 * KIB


class Stitched:
    """The fields that are neither ragged nor filtered, of shards that are mapped."""

    def __init__(self, manifest: Manifest, files: Sequence[ShardFile], slot: int) -> None:
        """Map the files once more, one behind another; ``of`` does it where it can be done."""
        names = [name for name, field in manifest.fields.items() if not field.ragged]
        self._files = tuple(files)
        self._block_size = manifest.block_size
        counts = [file.shard.num_samples for file in files]
        self._starts = np.cumsum([0, *counts[:-1]])
        self._shift = np.arange(len(files)) * slot - self._starts
        # Dividing is cheaper than searching; all shards but the last are equal as a rule.
        is_even = len(set(counts[:-1])) < 2 and max(counts) == counts[0]
        self._per_shard = counts[0] if is_even else 0
        self._arrays = {name: _joined(manifest, files, name, slot) for name in names}
        self._checked = np.zeros(-(-len(files) * slot // self._block_size), bool)
        self._all_checked = False
        for number, file in enumerate(files):
            first = number * slot // self._block_size
            flags = self._checked[first : first + len(file.checked)]
            flags[:] = file.checked
            file.checked = flags
        self._turn = 0

    @classmethod
    def of(cls, manifest: Manifest, files: Sequence[ShardFile]) -> Self | None:
        """Join files, None where one of them is not mapped or cannot be placed."""
        if not all(file.is_mapped for file in files):
            return None
        if is_compressed(manifest.fields):
            return None
        sizes = [field.sample_bytes for field in manifest.fields.values() if not field.ragged]
        most = max(file.shard.num_samples for file in files)
        for page in (HUGE_BYTES, PAGE_BYTES):
            # Rows after which every field, and every block, begins anew on such a page.
            step = lcm(manifest.block_size, *(page // gcd(page, size) for size in sizes if size))
            slot = -(-most // step) * step
            if sum(sizes) * slot * len(files) <= _MOST_BYTES:
                with suppress(OSError, ValueError):
                    return cls(manifest, files, slot)
        return None

    def rows_of(self, wanted: Array) -> Array | None:
        """Return the rows of samples, None if a file of theirs has changed."""
        if len(self._files) == 1:
            return wanted if self._is_current(self._files) else None
        if self._per_shard:
            homes = wanted // self._per_shard
        else:
            homes = np.searchsorted(self._starts, wanted, side="right") - 1
        files = (
            self._files
            if len(self._files) <= _FEW
            else [self._files[home] for home in set(homes.tolist())]
        )
        if not self._is_current(files):
            return None
        rows: Array = wanted + self._shift[homes]
        return rows

    def is_checked(self, rows: Array) -> bool:
        """Return whether the crc32 of all blocks of these rows was right."""
        if not self._all_checked:
            self._all_checked = all(file.all_checked for file in self._files)
        return self._all_checked or bool(self._checked[rows // self._block_size].all())

    def is_in_memory(self) -> bool:
        """Return whether all files lie in memory, as far as probes tell."""
        return all(in_memory(file.descriptor, file.shard.num_bytes) for file in self._files)

    def take(self, name: str, rows: Array, out: NDArray[Any]) -> None:
        """Copy rows of a field to ``out``."""
        take_rows(self._arrays[name], rows, out)

    def _is_current(self, files: Sequence[ShardFile]) -> bool:
        # A file that became shorter must not be touched; asking for its size is cheap. Whether
        # it was written to is asked of one file at a time, in turn.
        for file in files:
            num_bytes = os.lseek(file.descriptor, 0, os.SEEK_END)
            if file.is_replaced or num_bytes != file.shard.num_bytes:
                return False
        if not files:
            return True
        self._turn = turn = (self._turn + 1) % len(files)
        return not files[turn].is_changed()


def _joined(manifest: Manifest, files: Sequence[ShardFile], name: str, slot: int) -> NDArray[Any]:
    field = manifest.fields[name]
    num_bytes, size = len(files) * slot * field.sample_bytes, field.sample_bytes
    if not num_bytes:
        return np.empty((len(files) * slot, *field.shape), field.dtype)
    space = Space(num_bytes, files[0].shard.places[name].offset or 0)
    for number, file in enumerate(files):
        place, count = file.shard.places[name], file.shard.num_samples * size
        if place.offset is None:
            raise ValueError("only HDF5 can read it")
        at = number * slot * size
        if place.offset % PAGE_BYTES == 0:
            space.map_file(at, file.descriptor, place.offset, count)
        elif count <= _SMALL_BYTES:
            # Less than a page is aligned to nothing in a shard.
            space.put(at, os.pread(file.descriptor, count, place.offset))
        else:
            raise ValueError("its bytes do not begin on a page")
    return space.array(0, (len(files) * slot, *field.shape), field.dtype)
