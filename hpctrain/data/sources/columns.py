"""Columns of pyarrow as arrays."""

from typing import Any

import numpy as np

from hpctrain.data.sources.source import Array, needed
from hpctrain.errors import DataError


def values_of(column: Any, what: str) -> Array | list[Array]:
    """Return the values of a column: of texts, bytes and lists one array for each row.

    Args:
        column: a ``pyarrow.Array``.
        what: its name and file, for errors.

    Raises:
        DataError: a value is missing, or is neither a number, a text nor a list of numbers.
    """
    arrow = needed("pyarrow", what)
    types = arrow.types
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        raise DataError(
            f"a sample has all its values, {what} lacks {column.null_count} of "
            f"{len(column)}; fill them, or leave the column out: --field NAME=COLUMN"
        )
    kind = column.type
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind):
        column = column.cast(arrow.large_binary())
        kind = column.type
    if types.is_large_binary(kind):
        offsets = np.frombuffer(column.buffers()[1], np.int64)
        offsets = offsets[column.offset : column.offset + len(column) + 1]
        data = column.buffers()[2]
        flat = np.frombuffer(data or b"", np.uint8)
        return np.split(flat[: offsets[-1]], offsets[:-1])[1:]
    if types.is_fixed_size_list(kind):
        flat = _numbers(column.flatten(), what, arrow)
        return flat.reshape(len(column), kind.list_size, *flat.shape[1:])
    if types.is_list(kind) or types.is_large_list(kind):
        flat = _numbers(column.flatten(), what, arrow)
        ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
        return np.split(flat, ends[:-1])
    return _numbers(column, what, arrow)


def _numbers(column: Any, what: str, arrow: Any) -> Array:
    kind = column.type
    types = arrow.types
    if types.is_fixed_size_list(kind):
        flat = _numbers(column.flatten(), what, arrow)
        return flat.reshape(len(column), kind.list_size, *flat.shape[1:])
    plain = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    if not plain or column.null_count:
        raise DataError(
            f"a column holds numbers, texts, or lists of numbers that all are there, {what} "
            f"holds {kind}{' with gaps' if column.null_count else ''}; convert it, or leave it "
            f"out: --field NAME=COLUMN"
        )
    return np.asarray(column.to_numpy(zero_copy_only=False))
