"""Datasets of existing HDF5 files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import Field
from hpctrain.data.format.own import UNREADABLE, own_dataset
from hpctrain.data.format.part import raw_offset
from hpctrain.data.packing.images import raw
from hpctrain.data.packing.source import Array, Batch, Indexed, WantedFields, chosen, field_of

_NUM_EXAMINED = 64


@dataclass(kw_only=True)
class Hdf5(Indexed):
    """Datasets of one length, whose first dimension counts samples."""

    places: Mapping[str, str]
    """Path of each field's dataset in the file."""
    num_samples: int
    _file: Any = field(default=None, repr=False)
    _mapped: dict[str, Array | None] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """Gather samples: through HDF5 where they follow each other, else from a map if it can."""
        with _explained(self.files[0]):
            if self._file is None:
                self._file = _opened(self.files[0])
            return {name: self._rows(name, indices) for name in self.places}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open."""
        return {**self.__dict__, "_file": None, "_mapped": {}}

    def _rows(self, name: str, indices: NDArray[np.int64]) -> Array | list[Array]:
        dataset = own_dataset(self._file, self.places[name])
        if len(indices) and (np.diff(indices) == 1).all():
            rows = dataset[int(indices[0]) : int(indices[-1]) + 1]
        elif (mapped := self._map(name, dataset)) is not None:
            rows = mapped[indices]
        else:
            distinct, back = np.unique(indices, return_inverse=True)
            rows = dataset[distinct][back]
        return [_flat(row) for row in rows] if self.fields[name].ragged else rows

    def _map(self, name: str, dataset: Any) -> Array | None:
        if name not in self._mapped:
            path = self.files[0]
            offset = _plain_offset(dataset, path)
            self._mapped[name] = (
                None
                if offset is None
                else np.memmap(path, dataset.dtype, "r", offset, dataset.shape)
            )
        return self._mapped[name]


def _plain_offset(dataset: Any, path: Path) -> int | None:
    """Return where the values lie as numpy has them; texts, say, are pointers to elsewhere."""
    as_numpy = h5py.h5t.py_create(dataset.dtype, logical=True)
    if dataset.dtype.hasobject or not dataset.size or dataset.id.get_type() != as_numpy:
        return None
    return raw_offset(dataset, path.stat().st_size)


def open_hdf5(path: Path, wanted: WantedFields) -> Hdf5:
    """Examine an HDF5 file. Strings and rows of different lengths become ragged fields.

    Args:
        path: of the file.
        wanted: paths of datasets, such as ``{"x": "/images"}``; without them all are packed, by
            the last part of their path.

    Raises:
        DataError: the file cannot be read, the datasets have different lengths, or one of them
            is of a type that a data set cannot hold.
    """
    with _explained(path), _opened(path) as file:
        available, links = _listed(file)
        asked = {name: at.strip("/") for name, at in wanted.fields.items()}
        places = chosen(available, asked, str(path))
        if not asked:
            places = chosen([name.rpartition("/")[2] for name in available], {}, str(path))
            places = dict(zip(places, available, strict=True))
        datasets = {name: own_dataset(file, at) for name, at in places.items()}
        lengths = {
            places[name]: _length(datasets[name], f"{path}:/{places[name]}") for name in places
        }
        if len(set(lengths.values())) != 1:
            raise DataError(
                f"all fields have the same number of samples, the datasets of {path} have "
                f"{lengths or 'none'}; choose some: --field NAME=/DATASET"
            )
        fields = {name: _field(item, f"{path}:{item.name}") for name, item in datasets.items()}
        return Hdf5(
            fields=fields,
            files=[path],
            mean_lengths={
                name: _mean_length(datasets[name]) for name in fields if fields[name].ragged
            },
            notes=(_left_out(path, links),) if links and not asked else (),
            places=places,
            num_samples=next(iter(lengths.values())),
        )


def _listed(file: Any) -> tuple[list[str], list[str]]:
    """Return the paths of all datasets, each once, and the links to them or elsewhere."""
    found: dict[str, bool] = {}
    links: list[str] = []

    def add(name: str, item: Any) -> None:
        found[name] = isinstance(item, h5py.Dataset)

    def add_link(name: str, link: Any) -> None:
        if isinstance(link, h5py.ExternalLink):
            links.append(f"{name} -> {link.filename}:{link.path}")
        elif isinstance(link, h5py.SoftLink):
            links.append(f"{name} -> {link.path}")
        elif name not in found:
            first = next((one for one in found if file[one] == file[name]), "/")
            links.append(f"{name}, another name of {first}")

    file.visititems(add)
    file.visititems_links(add_link)
    return [name for name, is_dataset in found.items() if is_dataset], links


def _left_out(path: Path, links: Sequence[str]) -> str:
    return (
        f"links of {path} are left out, each dataset is packed once, from the file that holds it: "
        f"{'; '.join(links)}"
    )


def _opened(path: Path) -> Any:
    return h5py.File(path, "r", locking=False)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise what HDF5 says of a damaged file as a DataError."""
    try:
        yield
    except UNREADABLE as error:
        raise DataError(
            f"{path} cannot be read as an HDF5 file: {reason_of(error)}; check the file"
        ) from None


def _length(dataset: Any, what: str) -> int:
    if not dataset.shape:
        raise DataError(
            f"the first dimension of a dataset counts samples, {what} has none; "
            f"choose others: --field NAME=/DATASET"
        )
    return int(dataset.shape[0])


def _field(dataset: Any, what: str) -> Field:
    is_text = h5py.check_string_dtype(dataset.dtype) is not None
    element = np.dtype("u1") if is_text else h5py.check_vlen_dtype(dataset.dtype)
    if element is None:
        return field_of(dataset.shape[1:], dataset.dtype, what)
    if dataset.ndim != 1:
        raise DataError(
            f"texts and rows of different lengths have one dimension, {what} has {dataset.shape}; "
            f"choose others: --field NAME=/DATASET"
        )
    return Field.of((), field_of((), element, what).dtype, ragged=True)


def _flat(row: Any) -> Array:
    """Turn a text into its bytes."""
    if isinstance(row, str):
        return raw(row.encode())
    return raw(row) if isinstance(row, bytes) else np.asarray(row)


def _mean_length(dataset: Any) -> float:
    some = [len(_flat(row)) for row in dataset[:_NUM_EXAMINED]]
    return sum(some) / max(len(some), 1)
