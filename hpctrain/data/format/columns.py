"""Columns of samples that are written to a shard, and checks of their shapes and dtypes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpctrain.core.checksum import crc32
from hpctrain.core.errors import DataError
from hpctrain.core.python_compat import Self
from hpctrain.core.units import MIB
from hpctrain.data.format.dataset_manifest import Field, Place
from hpctrain.data.format.hdf5_values import filters, rows_per_chunk
from hpctrain.data.samples import Ragged


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Consecutive samples of a ragged field, whose rows are joined in one array."""

    values: NDArray[Any]  # ``(num_rows, *shape)``
    offsets: NDArray[np.int64]
    """``(num_samples + 1,)``: sample ``i`` is ``values[offsets[i] : offsets[i + 1]]``."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, part: slice) -> Self:
        return replace(self, offsets=self.offsets[part.start : part.stop + 1])

    @property
    def used(self) -> NDArray[Any]:
        """The rows of ``values`` that belong to these samples."""
        rows: NDArray[Any] = self.values[self.offsets[0] : self.offsets[-1]]
        return rows


Rows = Mapping[str, "NDArray[Any] | RaggedRows"]

Samples = Mapping[str, ArrayLike | Ragged | RaggedRows | Sequence[ArrayLike]] | Rows
"""For each field an array ``(num_samples, *shape)``; for a ragged field a list of arrays
``(length, *shape)``, or a ``Ragged``."""


def checked_rows(fields: Mapping[str, Field], samples: Samples) -> Rows:
    """Return samples converted to the dtypes of their fields.

    Raises ``DataError``: the samples have other fields, shapes or lengths, or a conversion loses
    precision.
    """
    if samples.keys() != fields.keys():
        raise DataError(f"samples must have the fields {sorted(fields)}, got {sorted(samples)}")
    rows: dict[str, NDArray[Any] | RaggedRows] = {}
    for name, field in fields.items():
        of_field: Any = samples[name]
        if field.ragged:
            rows[name] = _ragged(name, field, of_field)
        else:
            rows[name] = _array(name, field, np.asarray(of_field), "num_samples")
    lengths = {name: len(some) for name, some in rows.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"all fields must have the same number of samples, got {lengths}")
    return rows


def count(rows: Rows) -> int:
    """Return the number of samples."""
    return len(next(iter(rows.values())))


def _array(name: str, field: Field, array: NDArray[Any], counts: str) -> NDArray[Any]:
    if array.shape[1:] != field.shape or not array.ndim:
        raise DataError(
            f"field {name} must have shape ({counts}, *{field.shape}), got {array.shape}"
        )
    if array.size and not np.can_cast(array.dtype, field.dtype, "safe"):
        raise DataError(
            f"field {name} must have a dtype for all values of {array.dtype}, but has "
            f"{field.dtype}; convert the array first"
        )
    return array.astype(field.dtype, copy=False)


def _ragged(name: str, field: Field, samples: Any) -> RaggedRows:
    if isinstance(samples, Ragged):
        samples = RaggedRows(
            samples.values.numpy(force=True), samples.offsets.numpy(force=True).astype(np.int64)
        )
    if isinstance(samples, RaggedRows):
        values, offsets = _array(name, field, samples.values, "num_rows"), samples.offsets
        ends = (0, *offsets, len(values))
        if not len(offsets) or np.any(np.diff(ends) < 0):
            raise DataError(
                f"offsets of field {name} must increase from 0 to {len(values)}, its number "
                f"of rows, got {offsets}"
            )
        return RaggedRows(values, offsets)
    if not np.iterable(samples):
        raise DataError(
            f"the ragged field {name} must be a list of arrays (length, *{field.shape}), got "
            f"{type(samples).__name__}"
        )
    arrays = [_array(name, field, np.asarray(sample), "length") for sample in samples]
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    empty = np.empty((0, *field.shape), field.dtype)
    return RaggedRows(np.concatenate([empty, *arrays]), offsets)


_COPY_BYTES = 4 * MIB


class Column:
    """The samples of one field of an unfinished shard, with the checksums and index of the field.

    The samples are stored in a temporary file, because the size of a contiguous HDF5 dataset must
    be known when it is created.
    """

    def __init__(self, name: str, field: Field, spool: IO[bytes]) -> None:
        self._name, self._field, self._spool = name, field, spool
        self._num_rows = 0
        self._ends = [np.zeros(1, np.int64)]  # ends of the samples of a ragged field, in rows

    def append(self, samples: "NDArray[Any] | RaggedRows") -> None:
        """Append samples, which must have the dtype of the field."""
        rows = samples.used if isinstance(samples, RaggedRows) else samples
        if isinstance(samples, RaggedRows):
            ends = samples.offsets[1:] - samples.offsets[0] + self._num_rows
            self._ends.append(ends)
        self._num_rows += len(rows)
        data = np.ascontiguousarray(rows)
        self._spool.write(data.data.cast("B") if data.size else b"")

    def write(self, file: h5py.File, block_size: int) -> Place:
        """Write samples, checksums and index to a file; return a ``Place`` without offsets."""
        self._write_values(file, block_size)
        index = np.concatenate(self._ends).astype("<u8")
        starts = np.arange(0, self._num_rows, block_size)
        if self._field.ragged:
            starts = index[:-1:block_size].astype(np.int64)
        sizes = np.diff(np.append(starts, self._num_rows)) * self._field.sample_bytes
        self._spool.seek(0)
        crcs = np.array([crc32(self._spool.read(size)) for size in sizes], "<u4")
        file.create_dataset(f"crc/{self._name}", data=crcs)
        place = Place(offset=None, crc_offset=None, crc32=crc32(crcs.data))
        if not self._field.ragged:
            return place
        file.create_dataset(f"index/{self._name}", data=index)
        return replace(place, index_crc32=crc32(index.data), num_rows=self._num_rows)

    def _write_values(self, file: h5py.File, block_size: int) -> None:
        field, num_rows = self._field, self._num_rows
        step = max(1, _COPY_BYTES // max(1, field.sample_bytes))
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)  # ``fill_time=`` needs h5py 3.12
        options: dict[str, Any] = {"dcpl": properties}
        if field.compression and field.sample_bytes:
            step = _rows_of_chunk(field, block_size, num_rows)
            maxshape, chunks = (None, *field.shape), (step, *field.shape)
            options = {"maxshape": maxshape, "chunks": chunks, **filters()}
        dataset = file.create_dataset(
            f"data/{self._name}", (num_rows, *field.shape), field.dtype, **options
        )
        self._spool.seek(0)
        for start in range(0, num_rows if field.sample_bytes else 0, step):
            stop = min(start + step, num_rows)
            data = self._spool.read((stop - start) * field.sample_bytes)
            rows = np.frombuffer(data, field.dtype)
            dataset[start:stop] = rows.reshape(stop - start, *field.shape)


def _rows_of_chunk(field: Field, block_size: int, num_rows: int) -> int:
    """Return the rows per chunk: whole blocks, but not more blocks than ``num_rows`` need."""
    block = 1 if field.ragged else block_size
    return min(rows_per_chunk(field, block_size), max(1, -(-num_rows // block)) * block)
