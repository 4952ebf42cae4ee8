"""Arrays of numpy: ``.npy``, one field, and ``.npz``, a field for each array."""

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.packing.files import check_file
from hpctrain.data.packing.source import Array, Batch, Indexed, WantedFields, chosen, field_of

_LOCAL_HEADER_BYTES = 30


@dataclass(kw_only=True)
class Arrays(Indexed):
    """Arrays of one length, whose first dimension counts samples."""

    places: Mapping[str, tuple[Path, str | None]]
    """File of each field, and in an archive the name of the array."""
    num_samples: int
    _opened: dict[str, Array] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """Gather samples."""
        if not self._opened:
            self._opened = {name: _open(*place) for name, place in self.places.items()}
        return {name: array[indices] for name, array in self._opened.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the arrays: they are mapped, and pickled they would be copied."""
        return {**self.__dict__, "_opened": {}}


def open_arrays(path: Path, wanted: WantedFields) -> Arrays:
    """Examine arrays.

    Args:
        path: an ``.npz``, or an ``.npy``; then ``wanted.fields`` may name several ``.npy`` files
            in the same folder, without it the field is ``x``.
        wanted: which arrays.

    Raises:
        DataError: no arrays, of different lengths, or of types that a data set cannot hold.
    """
    if path.suffix == ".npz":
        names = chosen(_members(path), wanted.fields, str(path))
        places: dict[str, tuple[Path, str | None]] = {
            name: (path, member) for name, member in names.items()
        }
    else:
        files = wanted.fields or {"x": path.name}
        places = {name: (path.parent / file, None) for name, file in files.items()}
        for file, _ in places.values():
            if file.exists():
                check_file(file)
    arrays = {name: _open(*place) for name, place in places.items()}
    for name, array in arrays.items():
        if not array.ndim:
            raise DataError(
                f"the first dimension of an array counts samples, {name} of {path} has none; "
                f"choose others: --field NAME=ARRAY"
            )
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(
            f"all fields have the same number of samples, {path} has "
            f"{lengths or 'no array'}; choose some: --field NAME=ARRAY"
        )
    return Arrays(
        fields={
            name: field_of(array.shape[1:], array.dtype, f"{name} of {path}")
            for name, array in arrays.items()
        },
        files=sorted({file for file, _ in places.values()}),
        places=places,
        num_samples=len(next(iter(arrays.values()))),
    )


def load_array(path: Path) -> Array:
    """Read an ``.npy`` file whole.

    Raises:
        DataError: it is none, or holds Python objects.
    """
    return _loaded(path, mapped=False)


def _open(path: Path, member: str | None) -> Array:
    if member is None:
        return _loaded(path, mapped=True)
    try:
        mapped = _mapped_member(path, member)
        if mapped is not None:
            return mapped
        with np.load(path, allow_pickle=False) as archive:
            return np.asarray(archive[member])
    except (ValueError, EOFError, zipfile.BadZipFile, struct.error) as error:
        raise _unreadable(f"{member} of {path}", error) from None


def _loaded(path: Path, *, mapped: bool) -> Array:
    try:
        loaded = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise _unreadable(str(path), error) from None
    if not isinstance(loaded, np.ndarray):
        raise DataError(f"{path} must hold one array, as .npy files do; rename it to .npz")
    return loaded


def _members(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise _unreadable(str(path), error) from None
    return [name.removesuffix(".npy") for name in names if name.endswith(".npy")]


def _mapped_member(path: Path, member: str) -> Array | None:
    """Map an array that lies in its archive as it is: all ranks of a node share the memory."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{member}.npy")
    if info.compress_type != zipfile.ZIP_STORED:
        return None
    with path.open("rb") as file:
        file.seek(info.header_offset)
        name_bytes, extra_bytes = struct.unpack("<26x2H", file.read(_LOCAL_HEADER_BYTES))
        file.seek(name_bytes + extra_bytes, 1)
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            return None
        read_header: Any = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
        shape, is_fortran, dtype = read_header(file)
        if dtype.hasobject or 0 in shape or not shape:
            return None
        order = "F" if is_fortran else "C"
        return np.memmap(path, dtype, "r", file.tell(), shape, order)  # type: ignore[call-overload,no-any-return]


def _unreadable(what: str, error: BaseException) -> DataError:
    return DataError(
        f"{what} cannot be read as an array of numbers: {error}; write it again with numpy.save"
    )
