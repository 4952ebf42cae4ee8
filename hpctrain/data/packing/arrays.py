"""Arrays of numpy: ``.npy``, one field, and ``.npz``, a field for each array."""

import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.packing.files import check_file
from hpctrain.data.packing.source import (
    Array,
    Batch,
    Source,
    WantedFields,
    chosen,
    field_of,
    joined,
    readable,
)

_LOCAL_HEADER_BYTES = 30
_UNREADABLE = (ValueError, EOFError, zipfile.BadZipFile, zlib.error, struct.error)

Columns = Mapping[str, Any]
"""By field, what has a ``shape`` and gives samples for ``[rising indices]``."""


class Opened:
    """Columns that are opened at their first use, in any process."""

    def __init__(self, opener: Callable[[], Columns]) -> None:
        self._opener = opener

    def __call__(self, indices: NDArray[np.int64]) -> Batch:
        """Gather samples."""
        return {name: column[indices] for name, column in self._columns.items()}

    @cached_property
    def _columns(self) -> Columns:
        return self._opener()


def open_arrays(files: Sequence[str], wanted: WantedFields) -> Source:
    """Examine arrays.

    Of an ``.npy``, ``wanted.fields`` may name several ``.npy`` files in the same folder; without
    it the field is ``x``. Raises ``DataError``: no arrays, of different lengths, or of types that
    a data set cannot hold.
    """
    return joined([_examined(Path(file), wanted) for file in files])


def _examined(path: Path, wanted: WantedFields) -> Source:
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
    return Source(
        fields=fields,
        runs=[(length_of(arrays, str(path), "ARRAY"), Opened(opener))],
        files=sorted({str(file) for file, _ in places.values()}),
        sample_bytes=sum(one.sample_bytes for one in fields.values()),
    )


def length_of(columns: Columns, where: str, what: str) -> int:
    """Return the number of samples of columns."""
    for name, column in columns.items():
        if not column.shape:
            raise DataError(
                f"the first dimension of an array counts samples, {name} of {where} has none; "
                f"choose others: --field NAME={what}"
            )
    lengths = {name: int(column.shape[0]) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(
            f"all fields have the same number of samples, {where} has "
            f"{lengths or 'no array'}; choose some: --field NAME={what}"
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
    """Map an array that lies in its archive as it is: all ranks of a node share the memory."""
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
