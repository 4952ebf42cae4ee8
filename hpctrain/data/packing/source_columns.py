"""Columns of pyarrow as arrays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.data.packing.source import Array, needed

_LARGEST_WHOLE = 2**53
"""Up to which floats of 8 bytes hold all whole numbers."""


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


def check_numbers(column: Any, what: str, dtype: str) -> None:
    """Check that a column can be had as ``dtype``, or as it is written, with ``text``.

    Raises:
        DataError: one is text and the other is not.
    """
    types = needed("pyarrow", what).types
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    is_text = any(
        check(kind)
        for check in (
            types.is_string,
            types.is_large_string,
            types.is_binary,
            types.is_large_binary,
        )
    )
    if is_text != (dtype == "text"):
        raise DataError(
            f"numbers have a type such as f4, and CSV alone keeps them as text: {what} holds "
            f"{column.type}, got :{dtype}; leave the type out"
        )


def cast(values: Array | list[Array], dtype: str, what: str) -> Array | list[Array]:
    """Convert numbers; of what they are, floats lose digits at most.

    Raises:
        DataError: one of them does not fit.
    """
    if isinstance(values, list):
        return [_cast(row, dtype, what) for row in values]
    return _cast(values, dtype, what)


def _cast(values: Array, dtype: str, what: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        found = values.astype(dtype)
    if found.dtype.kind == "f":
        wrong = np.isinf(found) & np.isfinite(values)
    else:
        wrong = found != values
        if found.dtype.kind in "iu" and values.dtype.kind == "f":
            # The largest whole number of 8 bytes is none of float64, which rounds it up.
            wrong |= values >= float(np.iinfo(found.dtype).max) + 1
    if wrong.any():
        raise DataError(
            f"{what} holds {values[wrong].flat[0]}, which {dtype} cannot hold; choose another "
            f"type: --field NAME=COLUMN:TYPE"
        )
    return found


def side_by_side(columns: Sequence[tuple[str, Array | list[Array]]], path: Path) -> Array:
    """Return columns of numbers as one array, ``(num_rows, num_columns)``.

    Raises:
        DataError: one has more than a number a row, or whole numbers that a float beside them
            would change.
    """
    for at, values in columns:
        if isinstance(values, list) or values.ndim > 1:
            raise DataError(
                f"columns side by side hold one number a row, column {at} of {path} holds more; "
                f"give it a field of its own"
            )
    table = np.column_stack([np.asarray(values) for _, values in columns])
    for at, values in columns:
        whole = np.asarray(values)
        is_cut = whole.dtype.kind in "iu" and table.dtype.kind == "f"
        if is_cut and ((whole > _LARGEST_WHOLE) | (whole < -_LARGEST_WHOLE)).any():
            raise DataError(
                f"columns side by side become one type, here {table.dtype}, which changes whole "
                f"numbers of column {at} of {path}; give it a field of its own"
            )
    return table
