"""Sources that are ``.npy``, ``.npz`` and HDF5 files; each array becomes a field."""

import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.format.dataset_manifest import Field
from hpctrain.data.format.hdf5_values import UNREADABLE, own_dataset
from hpctrain.data.packing.files import check_file
from hpctrain.data.packing.source import (
    NUM_EXAMINED,
    Array,
    Batch,
    PackSource,
    WantedFields,
    chosen,
    field_of,
    joined,
    raw,
    readable,
)

_LOCAL_HEADER_BYTES = 30
_UNREADABLE = (ValueError, EOFError, zipfile.BadZipFile, zlib.error, struct.error)

Columns = Mapping[str, Any]
"""For each field an object with a ``shape``; ``object[indices]`` returns the samples at ascending
indices."""


class Opened:
    """Function that returns samples of columns; a process opens the columns at its first call."""

    def __init__(self, opener: Callable[[], Columns]) -> None:
        self._opener = opener

    def __call__(self, indices: NDArray[np.int64]) -> Batch:
        """Gather samples."""
        return {name: column[indices] for name, column in self._columns.items()}

    @cached_property
    def _columns(self) -> Columns:
        return self._opener()


def open_arrays(files: Sequence[str], wanted: WantedFields) -> PackSource:
    """Return the source for ``.npy`` and ``.npz`` files.

    For an ``.npy`` file, ``wanted.fields`` may name several ``.npy`` files in the same folder; by
    default the file becomes the field ``x``. Raises ``DataError``: there are no arrays, their
    lengths differ, or a data set cannot hold their types.
    """
    return joined([_examined(Path(file), wanted) for file in files])


def _examined(path: Path, wanted: WantedFields) -> PackSource:
    if path.suffix == ".npz":
        with readable(str(path), "arrays", *_UNREADABLE), zipfile.ZipFile(path) as archive:
            inside = archive.namelist()
        members = [name.removesuffix(".npy") for name in inside if name.endswith(".npy")]
        names = chosen(members, wanted.fields, str(path))
        places: dict[str, tuple[Path, str | None]] = {
            name: (path, member) for name, member in names.items()
        }
    else:
        files = wanted.fields or {"x": path.name}
        places = {name: (path.parent / file, None) for name, file in files.items()}
        for file, _ in places.values():
            if file.exists():
                check_file(str(file))
    opener = partial(_open_all, places)
    arrays = opener()
    fields = {
        name: field_of(array.shape[1:], array.dtype, f"{name} of {path}")
        for name, array in arrays.items()
        if array.ndim
    }
    return PackSource(
        fields=fields,
        runs=[(length_of(arrays, str(path), "ARRAY"), Opened(opener))],
        files=sorted({str(file) for file, _ in places.values()}),
        origins={name: member or file.name for name, (file, member) in places.items()},
        sample_bytes=sum(one.sample_bytes for one in fields.values()),
    )


def length_of(columns: Columns, where: str, what: str) -> int:
    """Return the number of samples, which must be equal in all columns."""
    for name, column in columns.items():
        if not column.shape:
            raise DataError(
                f"the first dimension of an array must count samples, but {name} of {where} is a "
                f"scalar; choose other arrays: --field NAME={what}"
            )
    lengths = {name: int(column.shape[0]) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(
            f"all fields must have the same number of samples, but {where} has "
            f"{lengths or 'no array'}; choose arrays of one length: --field NAME={what}"
        )
    return next(iter(lengths.values()))


def _open_all(places: Mapping[str, tuple[Path, str | None]]) -> dict[str, Array]:
    return {name: _opened(*place) for name, place in places.items()}


def _opened(path: Path, member: str | None) -> Array:
    what = str(path) if member is None else f"{member} of {path}"
    with readable(what, "an array of numbers", *_UNREADABLE):
        if member is not None:
            return _member(path, f"{member}.npy")
        return np.lib.format.open_memmap(path, mode="r")


def _member(path: Path, name: str) -> Array:
    """Map an uncompressed array, so that ranks of a node share its memory; read other arrays."""
    npy = np.lib.format
    with zipfile.ZipFile(path) as archive, archive.open(name) as file:
        info = archive.getinfo(name)
        if info.compress_type == zipfile.ZIP_STORED and npy.read_magic(file) == (1, 0):
            shape, is_fortran, dtype = npy.read_array_header_1_0(file)
            if shape and 0 not in shape and not dtype.hasobject:
                with path.open("rb") as whole:
                    whole.seek(info.header_offset)
                    header = whole.read(_LOCAL_HEADER_BYTES)
                start = info.header_offset + len(header) + sum(struct.unpack("<26x2H", header))
                order: Literal["F", "C"] = "F" if is_fortran else "C"
                return np.memmap(path, dtype, "r", start + file.tell(), shape, order)
        file.seek(0)
        return np.asarray(npy.read_array(file, allow_pickle=False))


class Dataset:
    """Column that reads samples of an HDF5 dataset at ascending indices.

    The file must stay open while the column is used.
    """

    def __init__(self, file: h5py.File, name: str) -> None:
        self._file, self._path = file, file.filename
        self._dataset = own_dataset(file, name)
        self.shape = self._dataset.shape

    def __getitem__(self, indices: NDArray[np.int64]) -> Array | list[Array]:
        with _readable(self._path):
            first, last = int(indices[0]), int(indices[-1])
            if last - first + 1 == len(indices):
                rows = self._dataset[first : last + 1]
            else:
                rows = self._dataset[indices]
        return [_flat(row) for row in rows] if _element_of(self._dataset) else rows

    @cached_property
    def field(self) -> Field:
        """Field of the data set that can store the HDF5 dataset."""
        what = f"{self._path}:{self._dataset.name}"
        element = _element_of(self._dataset)
        if element is None:
            return field_of(self.shape[1:], self._dataset.dtype, what)
        if len(self.shape) != 1:
            raise DataError(
                f"a dataset of texts or of rows of variable length must have one dimension, but "
                f"{what} has the shape {self.shape}; choose other datasets: --field "
                f"NAME=/DATASET"
            )
        return field_of((), element, what, ragged=True)

    @property
    def sample_bytes(self) -> float:
        """Mean bytes of a sample, estimated from the first samples."""
        if not self.field.ragged:
            return self.field.sample_bytes
        lengths = [len(_flat(row)) for row in self._dataset[:NUM_EXAMINED]]
        return self.field.sample_bytes * sum(lengths) / max(len(lengths), 1)


def open_hdf5(files: Sequence[str], wanted: WantedFields) -> PackSource:
    """Return the source for HDF5 files; strings and variable-length rows become ragged fields.

    Without ``wanted.fields`` all datasets are packed; the name of a field is the last component of
    the path of its dataset. Raises ``DataError``: a file cannot be read, the datasets have
    different lengths, or a data set cannot hold the type of a dataset.
    """
    return joined([_examined_hdf5(file, wanted) for file in files])


def _examined_hdf5(path: str, wanted: WantedFields) -> PackSource:
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
            f"links in {path} are skipped, because each dataset is packed once, from the file "
            f"that stores it: {', '.join(links)}"
        )
        return PackSource(
            runs=[(num_samples, Opened(partial(_open_datasets, path, places)))],
            fields={name: dataset.field for name, dataset in datasets.items()},
            files=[path],
            origins=places,
            sample_bytes=sum(dataset.sample_bytes for dataset in datasets.values()),
            notes=(note,) if links and not asked else (),
        )


def _open_datasets(path: str, places: Mapping[str, str]) -> dict[str, Dataset]:
    with _readable(path):
        file = h5py.File(path, "r", locking=False)
        return {name: Dataset(file, at) for name, at in places.items()}


def _listed(file: Any) -> tuple[list[str], list[str]]:
    """Return the paths of all datasets in an HDF5 file, each once, and the paths of links."""
    found: dict[str, bool] = {}
    names: list[str] = []
    file.visititems(lambda name, item: found.update({name: isinstance(item, h5py.Dataset)}))
    file.visititems_links(lambda name, _: names.append(name))
    datasets = [name for name, is_dataset in found.items() if is_dataset]
    return datasets, [name for name in names if name not in found]


def _readable(path: str) -> AbstractContextManager[None]:
    return readable(path, "an HDF5 file", *UNREADABLE)


def _element_of(dataset: Any) -> np.dtype[Any] | None:
    """Return the element type of rows of variable length; None if all rows have one shape."""
    if h5py.check_string_dtype(dataset.dtype) is not None:
        return np.dtype("u1")
    element: np.dtype[Any] | None = h5py.check_vlen_dtype(dataset.dtype)
    return element


def _flat(row: Any) -> Array:
    """Return a row as an array; a text becomes its bytes."""
    if isinstance(row, str):
        return raw(row.encode())
    return raw(row) if isinstance(row, bytes) else np.asarray(row)
