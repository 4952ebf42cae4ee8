"""Read a data set: any samples, in any order, gathered straight into one tensor per field."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hpctrain.data.layout import Field, Manifest
from hpctrain.data.shard import OpenShard, check_file
from hpctrain.errors import DataError, MismatchError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

Verify = Literal["first", "always", "off"]


class ShardedDataset:
    """A data set on disk, read through memory maps, or through HDF5 where it cannot be mapped.

    Cheap to pickle and safe to use after a fork: each process opens shards for itself, at first
    use.
    """

    def __init__(
        self, path: Path | str, *, verify: Verify = "first", manifest: Manifest | None = None
    ) -> None:
        """Read the manifest and check that every shard is there with its full size.

        Args:
            path: directory with ``manifest.json``.
            verify: when to check the crc32 of a block: at its first touch, always, never.
            manifest: of this directory, where it was read and checked before.

        Raises:
            DataError: the data set is missing, damaged or incomplete.
        """
        if verify not in ("first", "always", "off"):
            raise DataError(f"verify is first, always or off, got {verify!r}")
        self.path = Path(path)
        self.manifest = manifest or Manifest.read(self.path)
        self._verify = verify
        self._starts = np.cumsum([0] + [shard.num_samples for shard in self.manifest.shards])
        self._open: dict[int, OpenShard] = {}
        self._inherited: dict[int, OpenShard] = {}
        self._pid: int | None = None
        if manifest is None:
            self._check_files(range(len(self.manifest.shards)))

    @classmethod
    def open(cls, path: Path | str, comm: "Communicator", *, verify: Verify = "first") -> Self:
        """Open a data set on all ranks: one reads the manifest, each checks some of the shards.

        Collective.

        Raises:
            DataError: the data set is missing, damaged or incomplete; on every rank.
        """
        found: Manifest | str = ""
        if comm.rank == 0:
            try:
                found = Manifest.read(Path(path))
            except DataError as error:
                found = str(error)
        found = comm.broadcast_object(found)
        if isinstance(found, str):
            raise DataError(found)
        dataset = cls(path, verify=verify, manifest=found)
        dataset._check_together(comm)
        return dataset

    @property
    def fields(self) -> Mapping[str, Field]:
        """Shape and dtype of each field."""
        return self.manifest.fields

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._starts[-1])

    def take(self, indices: ArrayLike) -> dict[str, Tensor]:
        """Gather samples.

        Args:
            indices: ``(num_samples,)`` in [0, len), in any order, also none, also repeated.

        Returns:
            For each field a new tensor ``(num_samples, *shape)`` on the CPU.

        Raises:
            DataError: an index is out of range, or a shard is missing, replaced or damaged.
        """
        wanted = np.asarray(indices, np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise DataError(
                f"indices are in [0, {len(self)}), got {wanted.min()} to {wanted.max()}"
            )
        batch = {
            name: np.empty((len(wanted), *field.shape), field.dtype)
            for name, field in self.fields.items()
        }
        homes = np.searchsorted(self._starts, wanted, side="right") - 1
        for home in np.unique(homes):
            here = np.flatnonzero(homes == home)
            self._gather(int(home), wanted[here] - self._starts[home], here, batch)
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        return {**self.__dict__, "_open": {}, "_inherited": {}, "_pid": None}

    def _gather(
        self,
        home: int,
        rows: NDArray[np.int64],
        here: NDArray[np.int64],
        batch: dict[str, NDArray[Any]],
    ) -> None:
        shard = self._shard(home)
        if self._verify != "off":
            shard.check_blocks(rows, again=self._verify == "always")
        for name, out in batch.items():
            if len(here) == len(out):
                shard.gather(name, rows, out)
            else:
                some = np.empty((len(here), *out.shape[1:]), out.dtype)
                shard.gather(name, rows, some)
                out[here] = some

    def _shard(self, index: int) -> OpenShard:
        if self._pid != os.getpid():
            # Handles of HDF5 must not be used after a fork, nor closed: its lock may be held.
            self._inherited = self._open
            self._open, self._pid = {}, os.getpid()
        if index not in self._open:
            self._open[index] = OpenShard(self.path, self.manifest, index)
        return self._open[index]

    def _check_files(self, indices: Iterable[int]) -> None:
        for index in indices:
            check_file(self.path, self.manifest.shards[index])

    def _check_together(self, comm: "Communicator") -> None:
        num_shards = len(self.manifest.shards)
        # At least one each, so that a rank without the mount finds out.
        mine = range(comm.rank % num_shards, num_shards, comm.size)
        message = ""
        try:
            self._check_files(mine)
        except DataError as error:
            message = str(error)
        try:
            comm.agree(not message, message)
        except MismatchError as error:
            raise DataError(str(error)) from None
