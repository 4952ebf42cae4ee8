"""``ShardedDataset``, which reads samples from disk by index, into one tensor per field."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hpctrain.comm.agreement import agreed, on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.core.checks import checked
from hpctrain.core.errors import DataError
from hpctrain.core.paths import absolute
from hpctrain.core.python_compat import Self
from hpctrain.data.format.dataset_manifest import Field, Manifest
from hpctrain.data.format.hdf5_values import rows_per_chunk
from hpctrain.data.io.open_files import Handles, Opener
from hpctrain.data.io.shardfile import IO, OpenShard, check_file
from hpctrain.data.io.values import Array, ChunkCache
from hpctrain.data.samples import Indexable, Ragged, Values

Verify = Literal["first", "always", "off"]


class ShardedDataset(Indexable):
    """A data set on disk, mapped into memory if it fits.

    Can be pickled, and used after a fork, because each process opens shards at their first use.
    Several threads may read concurrently.

    The constructor reads the manifest, and checks that every shard exists and has the right size.

    Args:
        path: directory with ``manifest.json``.
        verify: when to check the crc32 of a block: at its first read, always, or never.
        io: ``map`` shards into memory, ``read`` the wanted rows, or ``auto``: map a data set
            if two copies fit into free memory. If the disk cannot read a mapped page, the system
            kills the process; this is rare, because blocks are read and checked before.
        manifest: manifest of this directory, if the caller has read it; then the constructor does
            not check the files of the shards.

    Raises:
        DataError: the data set is missing, damaged or incomplete.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        verify: Verify = "first",
        io: IO = "auto",
        manifest: Manifest | None = None,
    ) -> None:
        checked("verify", verify, Verify, DataError)
        checked("io", io, IO, DataError)
        self.path = absolute(path)
        self.manifest = manifest or Manifest.read(self.path)
        self._verify: Verify = verify
        self._io: IO = io
        self._opener: Opener = OpenShard
        self._starts = np.cumsum([0] + [shard.num_samples for shard in self.manifest.shards])
        self._num_samples = int(self._starts[-1])
        self._own: Handles | None = None
        self._inherited: list[Handles] = []
        if manifest is None:
            self._check_files(range(len(self.manifest.shards)))

    @classmethod
    def open(
        cls, path: Path | str, comm: Communicator, *, verify: Verify = "first", io: IO = "auto"
    ) -> Self:
        """Open a data set on all ranks: rank 0 reads the manifest, each rank checks some shards.

        Collective.

        Raises:
            DataError: the data set is missing, damaged or incomplete; on every rank.
        """
        found = on_root(comm, lambda: Manifest.read(absolute(path)), DataError)
        # Each rank checks at least one shard, to detect a missing mount.
        num_shards = len(found.shards)
        with agreed(comm, DataError):
            dataset = cls(path, verify=verify, io=io, manifest=found)
            dataset._check_files(range(comm.rank % num_shards, num_shards, comm.size))
        return dataset

    @property
    def uuid(self) -> str:
        """Identifier of this data set."""
        return self.manifest.uuid

    @property
    def fields(self) -> Mapping[str, Field]:
        """Shape and dtype of each field."""
        return self.manifest.fields

    @property
    def block_size(self) -> int:
        """Number of consecutive samples that are read together: a block or a chunk."""
        size = self.manifest.block_size
        chunks = [
            rows_per_chunk(field, size)
            for field in self.fields.values()
            if field.compression and not field.ragged
        ]
        return max([size, *chunks])

    @property
    def sample_bytes(self) -> float:
        """Mean size of a sample in bytes, all fields together."""
        return self.manifest.sample_bytes

    @property
    def in_memory(self) -> bool:
        """Whether all shards are open, mapped and in memory."""
        return self._own is not None and self._own.is_in_memory()

    def __len__(self) -> int:
        return self._num_samples

    def with_opener(self, opener: Opener) -> "ShardedDataset":
        """Return this data set, but with shards that ``opener`` opens."""
        found = ShardedDataset(self.path, verify=self._verify, io=self._io, manifest=self.manifest)
        found._opener = opener
        return found

    def take(self, indices: ArrayLike) -> dict[str, Values]:
        """Gather samples.

        Args:
            indices: ``(num_samples,)`` in [0, len), in any order; may be empty or repeat indices.

        Returns:
            For each field a tensor ``(num_samples, *shape)`` on the CPU, or the samples of a
            ragged field. The caller may change the values.

        Raises:
            CorruptError: samples cannot be read; the error has the range of their indices.
            DataError: an index is out of range.
        """
        wanted = self._in_range(indices)
        shard_of = self._handles().shard
        found = _split(wanted, self._starts)
        parts = [ShardRows(shard_of(home), rows, places) for home, rows, places in found]
        for shard, rows, _ in parts:
            # Detect a changed file even if checksums are not verified.
            some = rows[:0] if self._verify == "off" else rows
            shard.check_blocks(some, again=self._verify == "always")
        batch: dict[str, Values] = {}
        for name, field in self.fields.items():
            if field.ragged:
                batch[name] = _gather_ragged(name, parts, field)
                continue
            out = np.empty((len(wanted), *field.shape), field.dtype)
            for shard, rows, places in parts if out.size else ():
                shard.gather(name, rows, out, places)
            batch[name] = torch.from_numpy(out)
        return batch

    def will_need(self, indices: ArrayLike) -> None:
        """Start to read samples into memory, and return immediately.

        Raises:
            DataError: an index is out of range.
        """
        wanted = self._in_range(indices)
        self._handles().will_need(_split(wanted, self._starts), check=self._verify != "off")

    def file_of(self, index: int) -> str:
        """Return the path of the shard that holds sample ``index``."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return str(self.path / self.manifest.shards[number].file)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(self), self.block_size):
            yield from self.__getitems__(range(start, min(start + self.block_size, len(self))))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": None, "_inherited": []}

    def _in_range(self, indices: ArrayLike) -> Array:
        wanted = np.asarray(indices, np.int64)
        # As unsigned numbers, negative indices are larger than every valid index.
        if wanted.size and wanted.view(np.uint64).max() >= self._num_samples:
            raise DataError(
                f"indices must be in [0, {len(self)}), got {wanted.min()} to {wanted.max()}"
            )
        return wanted

    def _handles(self) -> Handles:
        own = self._own
        if own is None or own.pid != os.getpid():
            if own is not None:
                # In a forked process, HDF5 handles must not be used or closed, because another
                # thread may have held a lock of HDF5 during the fork.
                self._inherited.append(own)
            # A bound method would form a cycle that keeps this object and its open files alive.
            open_shard = partial(self._opener, self.path, self.manifest, chunks=ChunkCache())
            self._own = own = Handles(self.manifest, open_shard, self._io)
        return own

    def _check_files(self, indices: Iterable[int]) -> None:
        for index in indices:
            check_file(self.path, self.manifest, index)


class ShardRows(NamedTuple):
    """The samples of a batch that are stored in one shard."""

    shard: OpenShard
    rows: Array  # indices of the samples in the shard
    places: Array | None  # indices in the batch; None if the rows are the whole batch


def _split(wanted: Array, starts: Array) -> Iterator[tuple[int, Array, Array | None]]:
    """Yield ``(shard, rows, places)`` for each shard that has some of the samples.

    ``starts`` has the index of the first sample of each shard, and then the number of samples.
    """
    if len(starts) == 2:
        yield 0, wanted, None
        return
    homes = starts.searchsorted(wanted, side="right") - 1
    order = homes.argsort(kind="stable")
    rows, homes = (wanted - starts[homes])[order], homes[order]
    (changes,) = (homes[1:] != homes[:-1]).nonzero()
    for start, stop in pairwise([0, *(changes + 1).tolist(), len(wanted)]):
        if start < stop:
            yield int(homes[start]), rows[start:stop], order[start:stop]


def _gather_ragged(name: str, parts: Sequence[ShardRows], field: Field) -> Ragged:
    """Return the samples of a ragged field."""
    offsets = np.zeros(sum(len(part.rows) for part in parts) + 1, np.int64)
    lengths = offsets[1:]
    for shard, rows, places in parts:
        lengths[slice(None) if places is None else places] = shard.lengths(name, rows)
    np.cumsum(lengths, out=lengths)
    out = np.empty((int(offsets[-1]), *field.shape), field.dtype)
    for shard, rows, places in parts if out.size else ():
        starts = offsets[:-1] if places is None else offsets[places]
        shard.gather_ragged(name, rows, out, starts)
    return Ragged(torch.from_numpy(out), torch.from_numpy(offsets))
