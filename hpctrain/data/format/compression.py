"""Filtered fields: zstd as a filter of HDF5, in chunks of whole blocks."""

from collections.abc import Mapping
from typing import Any

from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB
from hpctrain.data.format.layout import Field

CHUNK_BYTES = 2 * MIB
"""Aimed at: smaller chunks compress less, larger ones are decoded for too few samples."""

_LEVEL = 3
_MOST_BYTES = 2**32 - 1


def is_compressed(fields: Mapping[str, Field]) -> bool:
    """Return whether any of these fields is."""
    return any(field.compression for field in fields.values())


def load_filters(fields: Mapping[str, Field]) -> None:
    """Let HDF5 find zstd, if any of these fields needs it.

    Raises:
        DataError: the package that brings it is not installed.
    """
    if not is_compressed(fields):
        return
    try:
        import hdf5plugin  # noqa: F401, PLC0415 - registers its filters; an extra
    except ImportError:
        raise DataError(
            "fields compressed with zstd need the package hdf5plugin; "
            'install it: pip install "hpctrain[zstd]"'
        ) from None


def filters() -> dict[str, Any]:
    """Return the arguments of ``create_dataset`` for zstd and a checksum of each chunk."""
    import hdf5plugin  # noqa: PLC0415 - an extra

    return {**hdf5plugin.Zstd(clevel=_LEVEL), "fletcher32": True}


def rows_per_chunk(field: Field, block_size: int) -> int:
    """Return how many rows are compressed together: whole blocks, of a ragged field 1 at least.

    Raises:
        DataError: a chunk would be larger than HDF5 can store.
    """
    step = 1 if field.ragged else block_size
    step_bytes = max(1, step * field.sample_bytes)
    if step_bytes > _MOST_BYTES:
        raise DataError(
            f"a chunk of HDF5 holds less than 4 GiB, but a block of {block_size} samples needs "
            f"{step_bytes} bytes; take a smaller block_size, or no compression"
        )
    return step * max(1, CHUNK_BYTES // step_bytes)
