"""Samples that are written to a shard: checked, cut, and kept in columns of three kinds.

A field that is stored as plain bytes needs its full size at once: known for samples of
one shape (``FixedColumn``), and only at the end for ragged ones (``SpooledColumn``). A filtered
field grows chunk by chunk (``ChunkedColumn``).
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    """The values of one field in one file, ``/data/<field>``."""

    capacity: int | None = None  # rows that the file has room for, None for any number

    def __init__(self, name: str, field: Field) -> None:
        self._name, self._field = name, field
        self._num_rows = 0  # in the column, without the rows that wait for a whole chunk
        self._file: Any = None

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows ``(num_rows, *shape)``, in the dtype of the field."""
        raise NotImplementedError

    def move(self, file: h5py.File) -> None:
        """Continue in another file, which has no more room than is needed."""
        self._file = file

    def finish(self) -> None:
        """Bring everything to the file."""


def new_column(path: Path, name: str, field: Field, block_size: int, capacity: int) -> Column:
    """Return what writes a field; temporary files go to the directory of the shard."""
    if field.compression and field.sample_bytes:
        return ChunkedColumn(name, field, block_size)
    if field.ragged:
        return SpooledColumn(name, field, path.parent)
    return FixedColumn(name, field, capacity)


class FixedColumn(Column):
    """A contiguous dataset that has its full size from the start."""

    def __init__(self, name: str, field: Field, capacity: int) -> None:
        super().__init__(name, field)
        self.capacity = capacity
        self._dataset: Any = None

    def append(self, rows: NDArray[Any]) -> None:
        """Write rows to their place."""
        self._dataset[self._num_rows : self._num_rows + len(rows)] = rows
        self._num_rows += len(rows)

    def move(self, file: h5py.File) -> None:
        """Copy the rows to a dataset of just that size."""
        old = self._dataset
        if old is not None:
            self.capacity = self._num_rows
        self._dataset = _contiguous(file, self._name, self._field, self.capacity or 0)
        step = max(1, _COPY_BYTES // max(1, self._field.sample_bytes))
        for start in range(0, self._num_rows, step):
            some = slice(start, min(start + step, self._num_rows))
            self._dataset[some] = old[some]


class SpooledColumn(Column):
    """A contiguous dataset whose values wait in a temporary file until their number is known.

    The temporary file has no name, so that nothing of it remains after a kill.
    """

    def __init__(self, name: str, field: Field, directory: Path) -> None:
        super().__init__(name, field)
        self._spool = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed at the end

    def append(self, rows: NDArray[Any]) -> None:
        """Keep rows for the end."""
        self._spool.write(np.ascontiguousarray(rows).data.cast("B") if rows.size else b"")
        self._num_rows += len(rows)

    def finish(self) -> None:
        """Copy the temporary file to the dataset."""
        dataset = _contiguous(self._file, self._name, self._field, self._num_rows)
        row_bytes = self._field.sample_bytes
        if row_bytes:
            step = max(1, _COPY_BYTES // row_bytes)
            self._spool.seek(0)
            for start in range(0, self._num_rows, step):
                stop = min(start + step, self._num_rows)
                piece = self._spool.read((stop - start) * row_bytes)
                rows = np.frombuffer(piece, self._field.dtype)
                dataset[start:stop] = rows.reshape(stop - start, *self._field.shape)
        self._spool.close()


class ChunkedColumn(Column):
    """A filtered dataset, to which only whole chunks are written, but for the last."""

    def __init__(self, name: str, field: Field, block_size: int) -> None:
        """Take memory for one chunk; a dataset that does not fill it gets a smaller one."""
        super().__init__(name, field)
        self._step = 1 if field.ragged else block_size
        num_rows = rows_per_chunk(field, block_size)
        self._chunk = np.empty((num_rows, *field.shape), field.dtype)
        self._num_waiting = 0

    def append(self, rows: NDArray[Any]) -> None:
        """Fill the chunk; write it when it is full."""
        while len(rows):
            some = rows[: len(self._chunk) - self._num_waiting]
            self._chunk[self._num_waiting : self._num_waiting + len(some)] = some
            self._num_waiting += len(some)
            rows = rows[len(some) :]
            if self._num_waiting == len(self._chunk):
                self._write()

    def move(self, file: h5py.File) -> None:
        """Copy the chunks without decoding them."""
        old, self._file = self._file, file
        if self._num_rows:
            file.copy(old[f"data/{self._name}"], file.require_group("data"), self._name)

    def finish(self) -> None:
        """Write the last chunk."""
        if self._num_waiting or not self._num_rows:
            self._write()

    def _write(self) -> None:
        if not self._num_rows:
            self._create()
        dataset, start = self._file[f"data/{self._name}"], self._num_rows
        self._num_rows += self._num_waiting
        dataset.resize(self._num_rows, axis=0)
        dataset[start:] = self._chunk[: self._num_waiting]
        self._num_waiting = 0

    def _create(self) -> None:
        num_steps = max(1, -(-self._num_waiting // self._step))
        self._file.create_dataset(
            f"data/{self._name}",
            (0, *self._field.shape),
            self._field.dtype,
            maxshape=(None, *self._field.shape),
            chunks=(num_steps * self._step, *self._field.shape),
            **filters(),
        )


def _contiguous(file: h5py.File, name: str, field: Field, num_rows: int) -> Any:
    shape = (num_rows, *field.shape)
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)  # the argument fill_time needs h5py 3.12
    return file.create_dataset(f"data/{name}", shape, field.dtype, dcpl=how)
