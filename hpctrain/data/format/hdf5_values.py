"""Values in HDF5 files: compression, offsets of plain bytes, and protection against links."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import h5py

from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB
from hpctrain.data.format.dataset_manifest import Field

CHUNK_BYTES = 2 * MIB
"""Target size of a chunk. Smaller chunks compress less. Readers decode whole chunks, so larger
chunks contain more samples that are decoded but not used."""

_LEVEL = 3
_MOST_BYTES = 2**32 - 1


def is_compressed(fields: Mapping[str, Field]) -> bool:
    """Return whether any of these fields is compressed."""
    return any(field.compression for field in fields.values())


def load_filters(fields: Mapping[str, Field]) -> None:
    """Register zstd in HDF5 if any of these fields needs it."""
    if not is_compressed(fields):
        return
    try:
        import_module("hdf5plugin")  # the import registers the filters
    except ImportError:
        raise DataError(
            "fields compressed with zstd must be read with the package hdf5plugin, but it is "
            'not installed; pip install "hpctrain[zstd]"'
        ) from None


def filters() -> dict[str, Any]:
    """Return the arguments of ``create_dataset`` that enable zstd and a checksum of each chunk."""
    return {**import_module("hdf5plugin").Zstd(clevel=_LEVEL), "fletcher32": True}


def rows_per_chunk(field: Field, block_size: int) -> int:
    """Return the rows per chunk, a multiple of ``block_size`` unless the field is ragged."""
    step = 1 if field.ragged else block_size
    step_bytes = max(1, step * field.sample_bytes)
    if step_bytes > _MOST_BYTES:
        raise DataError(
            f"a chunk of HDF5 must have less than 4 GiB, but a block of {block_size} samples "
            f"has {step_bytes} bytes; use a smaller block_size, or no compression"
        )
    return step * max(1, CHUNK_BYTES // step_bytes)


UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, TypeError)
"""Errors that HDF5 or this package raise for a damaged file."""

_MOST_LINKS = 16  # maximum length of a chain of soft links


def own_dataset(file: h5py.File, path: str) -> Any:
    """Return the object at a path in an HDF5 file, usually a dataset, without opening other files.

    External links, external storage and virtual datasets are refused, because a malicious file
    could use them to read any file of this machine. Raises ``KeyError`` if there is no object at
    ``path``, and ``ValueError`` if the object is in another file.
    """
    found = file[_resolved(file, path)]
    if isinstance(found, h5py.Dataset) and (found.is_virtual or found.external):
        where = "external storage" if found.external else "a virtual dataset"
        raise ValueError(_refusal(path, where))
    return found


def _resolved(file: h5py.File, path: str) -> str:
    """Return ``path`` with its soft links resolved.

    The links are resolved here, because HDF5 would follow links into other files.
    """
    left, at, num_links = _parts(path), "/", 0
    while left:
        name = left.pop(0)
        group = file[at]
        if not isinstance(group, h5py.Group):
            raise KeyError(f"{path} does not exist, because {at} is not a group")
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.SoftLink):
            num_links += 1
            if num_links > _MOST_LINKS:
                raise ValueError(
                    f"a path must contain at most {_MOST_LINKS} soft links, but "
                    f"/{path.lstrip('/')} contains more"
                )
            at = "/" if link.path.startswith("/") else at
            left = [*_parts(link.path), *left]
        elif isinstance(link, h5py.HardLink):
            at = f"{at.rstrip('/')}/{name}"
        elif link is None:
            raise KeyError(f"{path} does not exist")
        else:
            raise ValueError(_refusal(path, "an external link"))
    return at


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _refusal(path: str, what: str) -> str:
    return (
        f"values must be stored in the file that names them, but /{path.lstrip('/')} is "
        f"{what}; copy them into the file, or pack the file that has them"
    )


def raw_offset(dataset: Any, file_bytes: int) -> int | None:
    """Return the offset of a dataset in its file if its values are stored as plain bytes.

    Returns None if only HDF5 can read the values: the storage is chunked, compact, virtual,
    filtered, external or missing, or the byte order is not little-endian.
    """
    properties = dataset.id.get_create_plist()
    offset = dataset.id.get_offset()
    plain = (
        properties.get_layout() == h5py.h5d.CONTIGUOUS
        and properties.get_nfilters() == 0
        and properties.get_external_count() == 0
        and dataset.dtype.newbyteorder("<") == dataset.dtype
    )
    if not plain or offset is None or offset + dataset.nbytes > file_bytes:
        return None
    return int(offset)
