"""Shards that are mapped one behind another, so that one copy takes rows of many files."""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.python_compat import Self
from hpctrain.core.units import KIB
from hpctrain.data.format.layout import Manifest
from hpctrain.data.io.mapped import HUGE_BYTES, Space
from hpctrain.data.io.shardfile import ShardFile
from hpctrain.data.io.values import Array, take_rows

_MOST_BYTES = 1 << 45
_FEW = 4
_SMALL_BYTES = 64 * KIB


class JoinedMap:
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
        for number, file in enumerate(files):
            first = number * slot // self._block_size
            flags = self._checked[first : first + len(file.checked)]
            flags[:] = file.checked
            file.checked = flags
        self._all_checked = False
        self._turn = 0

    @classmethod
    def of(cls, manifest: Manifest, files: Sequence[ShardFile]) -> Self | None:
        """Join files, None where one of them is not mapped or cannot be placed."""
        fields = {name: field for name, field in manifest.fields.items() if not field.ragged}
        is_plain = not any(field.compression for field in fields.values())
        if not is_plain or not all(file.is_mapped for file in files):
            return None
        most = max(file.shard.num_samples for file in files)
        is_copied = {name: _is_copied(manifest, files[0], name, most) for name in fields}
        sizes = [field.sample_bytes for name, field in fields.items() if not is_copied[name]]
        for page in (HUGE_BYTES, mmap.PAGESIZE):
            # Rows after which every field, and every block, begins anew on such a page.
            step = lcm(manifest.block_size, *(page // gcd(page, size) for size in sizes))
            slot = -(-most // step) * step
            if sum(sizes) * slot * len(files) <= _MOST_BYTES:
                # Too few addresses, too little memory, or bytes that begin on no page.
                with suppress(OSError, ValueError, MemoryError):
                    return cls(manifest, files, slot)
        return None

    def is_in_memory(self, *, fits: bool) -> bool:
        """Return whether every file was in memory when it was opened, or has come there since.

        ``fits`` says whether what was read and checked stays there.
        """
        return all(file.was_cached or (fits and file.all_checked) for file in self._files)

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
    shape = (len(files) * slot, *field.shape)
    most = max(file.shard.num_samples for file in files)
    if _is_copied(manifest, files[0], name, most):
        array = np.empty(shape, field.dtype)
        for number, file in enumerate(files):
            count = file.shard.num_samples
            array[number * slot : number * slot + count] = file.values[name].between(0, count)
        return array
    space = Space(shape, field.dtype, files[0].shard.places[name].offset or 0)
    for number, file in enumerate(files):
        if (offset := file.shard.places[name].offset) is None:
            raise ValueError("only HDF5 can read it")
        num_bytes = file.shard.num_samples * field.sample_bytes
        space.map_file(number * slot * field.sample_bytes, file.descriptor, offset, num_bytes)
    return space.array()


def _is_copied(manifest: Manifest, file: ShardFile, name: str, most: int) -> bool:
    # Less than a page is aligned to nothing in a shard.
    small = manifest.fields[name].sample_bytes * most <= _SMALL_BYTES
    return small or file.is_kept(name)
