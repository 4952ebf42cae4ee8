"""One shard opened for reading: mapped bytes where the manifest has an offset, else HDF5."""

import mmap
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.data.layout import Manifest, Shard
from hpctrain.errors import DataError
from hpctrain.files import reason_of

_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def check_file(directory: Path, shard: Shard) -> None:
    """Check that the file of a shard is there and has the size it was written with.

    Raises:
        DataError: it is missing, cannot be seen, or is longer or shorter.
    """
    path = directory / shard.file
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if num_bytes != shard.num_bytes:
        raise DataError(
            f"shard {path} has {shard.num_bytes} bytes by its manifest, got {num_bytes}: "
            f"it was truncated or replaced; copy it again"
        )


class OpenShard:
    """Gathers samples of one file; belongs to the process that opened it."""

    def __init__(self, directory: Path, manifest: Manifest, index: int) -> None:
        """Map the file and read its table of checksums.

        Raises:
            DataError: the file is missing, or not the one that the manifest describes.
        """
        self._shard = manifest.shards[index]
        self._manifest = manifest
        self._path = directory / self._shard.file
        self._first = sum(shard.num_samples for shard in manifest.shards[:index])
        self._unchecked = np.ones(manifest.num_blocks(self._shard), bool)
        self._hdf5: Any = None
        check_file(directory, self._shard)
        try:
            with self._path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            # As numpy arrays, or as h5py datasets where only HDF5 finds the values.
            self._data = {name: self._values("data", name) for name in manifest.fields}
            self._crcs = {name: self._values("crc", name)[:] for name in manifest.fields}
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(self._path, error) from error
        self._check_identity()

    def check_blocks(self, rows: NDArray[np.int64], *, again: bool) -> None:
        """Check the crc32 of the blocks of some samples; unless ``again``, of new ones only.

        Raises:
            DataError: bytes have changed; names the shard, the block and its samples.
        """
        touched = np.zeros_like(self._unchecked)
        touched[rows // self._manifest.block_size] = True
        for block in np.flatnonzero(touched if again else touched & self._unchecked):
            self._check_block(int(block))
        self._unchecked &= ~touched

    def gather(self, name: str, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy some samples of a field, numbered from the start of this shard, to ``out``."""
        data = self._data[name]
        if isinstance(data, np.ndarray):
            # numpy buffers the result unless told how to treat indices out of range.
            np.take(data, rows, axis=0, out=out, mode="clip")
        elif out.size:
            # HDF5 wants growing indices, each once.
            unique, places = np.unique(rows, return_inverse=True)
            out[...] = self._read(data, unique)[places]

    def _values(self, group: str, name: str) -> Any:
        place, field = self._shard.places[name], self._manifest.fields[name]
        if group == "data":
            offset, shape, dtype = (
                place.offset,
                (self._shard.num_samples, *field.shape),
                field.dtype,
            )
        else:
            offset, shape, dtype = place.crc_offset, self._unchecked.shape, "<u4"
        if offset is not None:
            return np.ndarray(shape, dtype, self._bytes, offset)
        self._hdf5 = self._hdf5 or h5py.File(self._path, "r", locking=False)
        dataset = self._hdf5[f"{group}/{name}"]
        # The checksum covers the values, not what HDF5 says of them.
        if not isinstance(dataset, h5py.Dataset) or (dataset.shape, dataset.dtype) != (
            shape,
            dtype,
        ):
            raise ValueError(f"/{group}/{name} is not what the manifest says")
        return dataset

    def _read(self, data: Any, rows: Any) -> NDArray[Any]:
        try:
            return np.ascontiguousarray(data[rows])
        except (OSError, RuntimeError) as error:
            raise _unreadable(self._path, error) from error

    def _check_identity(self) -> None:
        places = self._shard.places
        tables_fit = all(
            zlib.crc32(crcs.data) == places[n].crc32 for n, crcs in self._crcs.items()
        )
        if self._bytes[: len(_SIGNATURE)] != _SIGNATURE or not tables_fit:
            raise DataError(
                f"shard {self._path} is not the file that its manifest describes: "
                f"it was damaged or replaced; copy it again"
            )

    def _check_block(self, block: int) -> None:
        start = block * self._manifest.block_size
        stop = min(start + self._manifest.block_size, self._shard.num_samples)
        for name, data in self._data.items():
            if zlib.crc32(self._read(data, slice(start, stop)).data) != self._crcs[name][block]:
                raise DataError(
                    f"shard {self._path} is damaged: block {block} of field {name} (samples "
                    f"{self._first + start} to {self._first + stop - 1} of the data set) "
                    f"has the wrong crc32; copy the file again"
                )


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"cannot read shard {path}: {reason_of(error)}; copy it again or check the mount"
    )
