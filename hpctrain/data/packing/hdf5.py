"""Datasets of existing HDF5 files."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.format.hdf5_values import UNREADABLE, own_dataset, raw_offset
from hpctrain.data.format.layout import Field
from hpctrain.data.packing.arrays import Opened, length_of
from hpctrain.data.packing.source import (
    NUM_EXAMINED,
    Array,
    Source,
    WantedFields,
    chosen,
    field_of,
    joined,
    raw,
    readable,
)


class Dataset:
    """Samples of a dataset, in an order that rises."""

    def __init__(self, file: h5py.File, name: str) -> None:
        """Find a dataset in an open file, which stays open as long as the dataset is needed."""
        self._file, self._path = file, file.filename
        self._dataset = own_dataset(file, name)
        self.shape = self._dataset.shape

    def __getitem__(self, indices: NDArray[np.int64]) -> Array | list[Array]:
        with _readable(self._path):
            first, last = int(indices[0]), int(indices[-1])
            if last - first + 1 == len(indices):
                rows = self._dataset[first : last + 1]
            else:
                rows = (self._dataset if self._map is None else self._map)[indices]
        return [_flat(row) for row in rows] if _element_of(self._dataset) else rows

    @cached_property
    def field(self) -> Field:
        """The field that it becomes."""
        what = f"{self._path}:{self._dataset.name}"
        element = _element_of(self._dataset)
        if element is None:
            return field_of(self.shape[1:], self._dataset.dtype, what)
        if len(self.shape) != 1:
            raise DataError(
                f"texts and rows of different lengths have one dimension, {what} has "
                f"{self.shape}; choose others: --field NAME=/DATASET"
            )
        return field_of((), element, what, ragged=True)

    @property
    def sample_bytes(self) -> float:
        """Mean bytes of the first samples."""
        if not self.field.ragged:
            return self.field.sample_bytes
        lengths = [len(_flat(row)) for row in self._dataset[:NUM_EXAMINED]]
        return self.field.sample_bytes * sum(lengths) / max(len(lengths), 1)

    @cached_property
    def _map(self) -> Array | None:
        """The values, where they lie as numpy has them; texts, say, are pointers to elsewhere."""
        dataset = self._dataset
        as_numpy = h5py.h5t.py_create(dataset.dtype, logical=True)
        if dataset.dtype.hasobject or not dataset.size or dataset.id.get_type() != as_numpy:
            return None
        offset = raw_offset(dataset, Path(self._path).stat().st_size)
        if offset is None:
            return None
        return np.memmap(self._path, dataset.dtype, "r", offset, dataset.shape)


def open_hdf5(files: Sequence[str], wanted: WantedFields) -> Source:
    """Examine HDF5 files. Strings and rows of different lengths become ragged fields.

    Without ``wanted.fields`` all datasets are packed, by the last part of their path. Raises
    ``DataError``: a file cannot be read, the datasets have different lengths, or one of them is of
    a type that a data set cannot hold.
    """
    return joined([_examined(file, wanted) for file in files])


def _examined(path: str, wanted: WantedFields) -> Source:
    with _readable(path), h5py.File(path, "r", locking=False) as file:
        available, links = _listed(file)
        asked = {name: at.strip("/") for name, at in wanted.fields.items()}
        places = chosen(available, asked, path)
        if not asked:
            places = chosen([name.rpartition("/")[2] for name in available], {}, path)
            places = dict(zip(places, available, strict=True))
        datasets = {name: Dataset(file, at) for name, at in places.items()}
        num_samples = length_of(datasets, path, "/DATASET")
        note = (
            f"links of {path} are left out, each dataset is packed once, from the file that holds "
            f"it: {', '.join(links)}"
        )
        return Source(
            runs=[(num_samples, Opened(partial(_open_all, path, places)))],
            fields={name: dataset.field for name, dataset in datasets.items()},
            files=[path],
            sample_bytes=sum(dataset.sample_bytes for dataset in datasets.values()),
            notes=(note,) if links and not asked else (),
        )


def _open_all(path: str, places: Mapping[str, str]) -> dict[str, Dataset]:
    with _readable(path):
        file = h5py.File(path, "r", locking=False)
        return {name: Dataset(file, at) for name, at in places.items()}


def _listed(file: Any) -> tuple[list[str], list[str]]:
    """Return the paths of all datasets, each once, and the links to them or elsewhere."""
    found: dict[str, bool] = {}
    names: list[str] = []
    file.visititems(lambda name, item: found.update({name: isinstance(item, h5py.Dataset)}))
    file.visititems_links(lambda name, _: names.append(name))
    datasets = [name for name, is_dataset in found.items() if is_dataset]
    return datasets, [name for name in names if name not in found]


def _readable(path: str) -> AbstractContextManager[None]:
    return readable(path, "an HDF5 file", *UNREADABLE)


def _element_of(dataset: Any) -> np.dtype[Any] | None:
    """Return of what the rows of a dataset have any number; None where all have a shape."""
    if h5py.check_string_dtype(dataset.dtype) is not None:
        return np.dtype("u1")
    element: np.dtype[Any] | None = h5py.check_vlen_dtype(dataset.dtype)
    return element


def _flat(row: Any) -> Array:
    """Turn a text into its bytes."""
    if isinstance(row, str):
        return raw(row.encode())
    return raw(row) if isinstance(row, bytes) else np.asarray(row)
