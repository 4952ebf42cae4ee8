"""Samples that are written to a shard: checked, and kept in columns until it is full."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpctrain.core.errors import DataError
from hpctrain.core.python_compat import Self
from hpctrain.core.units import MIB
from hpctrain.data.format.dataset_manifest import Field
from hpctrain.data.format.hdf5_values import filters, rows_per_chunk
from hpctrain.data.samples import Ragged


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Samples of a ragged field."""

    values: NDArray[Any]  # ``(num_rows, *shape)``
    offsets: NDArray[np.int64]
    """``(num_samples + 1,)``: between which of ``values`` each sample lies."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, part: slice) -> Self:
        return replace(self, offsets=self.offsets[part.start : part.stop + 1])

    @property
    def used(self) -> NDArray[Any]:
        """The ``values`` that belong to samples."""
        rows: NDArray[Any] = self.values[self.offsets[0] : self.offsets[-1]]
        return rows


Rows = Mapping[str, "NDArray[Any] | RaggedRows"]

Samples = Mapping[str, ArrayLike | Ragged | RaggedRows | Sequence[ArrayLike]] | Rows
"""For each field an array ``(num_samples, *shape)``; for a ragged one a list of arrays
``(length, *shape)``, or a ``Ragged``."""


def checked_rows(fields: Mapping[str, Field], samples: Samples) -> Rows:
    """Return samples in the dtypes of their fields."""
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
        raise DataError(f"field {name} has shape ({counts}, *{field.shape}), got {array.shape}")
    if array.size and not np.can_cast(array.dtype, field.dtype, "safe"):
        raise DataError(
            f"field {name} holds {field.dtype}, which cannot hold every {array.dtype}; "
            f"convert the array first"
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
                f"offsets of field {name} must grow from 0 to {len(values)}, its number of rows, "
                f"got {offsets}"
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
    """The values of one field of a shard, ``/data/<field>``.

    They wait in a temporary file, as HDF5 stores plain bytes in one stretch of known size.
    """

    def __init__(self, name: str, field: Field, spool: IO[bytes]) -> None:
        self._name, self._field, self._spool = name, field, spool
        self._num_rows = 0

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows ``(num_rows, *shape)``, in the dtype of the field."""
        self._spool.write(np.ascontiguousarray(rows).data.cast("B") if rows.size else b"")
        self._num_rows += len(rows)

    def write(self, file: h5py.File, block_size: int) -> None:
        """Write all rows to a file."""
        field, shape = self._field, (self._num_rows, *self._field.shape)
        step = max(1, _COPY_BYTES // max(1, field.sample_bytes))
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)  # the argument needs h5py 3.12
        options: dict[str, Any] = {"dcpl": properties}
        if field.compression and field.sample_bytes:
            step = _rows_of_chunk(field, block_size, self._num_rows)
            maxshape, chunks = (None, *field.shape), (step, *field.shape)
            options = {"maxshape": maxshape, "chunks": chunks, **filters()}
        dataset = file.create_dataset(f"data/{self._name}", shape, field.dtype, **options)
        self._spool.seek(0)
        for start in range(0, self._num_rows if field.sample_bytes else 0, step):
            num_rows = min(step, self._num_rows - start)
            rows = np.frombuffer(self._spool.read(num_rows * field.sample_bytes), field.dtype)
            dataset[start : start + num_rows] = rows.reshape(num_rows, *field.shape)


def _rows_of_chunk(field: Field, block_size: int, num_rows: int) -> int:
    """Return the rows of a chunk: whole blocks, and no more than needed for a small field."""
    block = 1 if field.ragged else block_size
    return min(rows_per_chunk(field, block_size), max(1, -(-num_rows // block)) * block)
