"""Columns of tables of pyarrow, read some rows at a time."""

import lzma
import re
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import DataError
from hpctrain.data.packing.source import (
    Array,
    Batch,
    Streamed,
    WantedFields,
    chosen,
    field_of,
    raw,
)

TEXT = "text"
"""Type of a column of CSV that stays as it is written."""

UNREADABLE = (pa.ArrowException, OSError, EOFError, KeyError, zlib.error, lzma.LZMAError)
"""What a damaged file leads to, in pyarrow and in what unpacks it."""

_TYPE = re.compile(rf"{TEXT}|b1|[iu][1248]|f[248]")
_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_LARGEST_WHOLE = 2**53
"""Up to which floats of 8 bytes hold all whole numbers."""


@dataclass(kw_only=True)
class Table(Streamed):
    """Rows of tables. A field is a column, or several columns of numbers side by side."""

    columns: Mapping[str, Sequence[str]]
    dtypes: Mapping[str, str]
    """Of the fields whose type was asked for."""

    @abstractmethod
    def record_batches(self, part: int) -> Iterator[Any]:
        """Read the record batches of a part, with the wanted columns."""

    def path_of(self, part: int) -> str:
        """Return the file of a part."""
        return self.files[part]

    @property
    def wanted(self) -> list[str]:
        """Names of the columns that are packed."""
        return sorted(set(chain.from_iterable(self.columns.values())))

    def batches(self, part: int) -> Iterator[Batch]:
        """Read the rows of a part.

        Raises:
            DataError: the file cannot be read, or a value is missing.
        """
        path = self.path_of(part)
        try:
            for rows in self.record_batches(part):
                if rows.num_rows:
                    yield {name: self._values(name, rows, path) for name in self.columns}
        except UNREADABLE as error:
            raise DataError(
                f"{path} cannot be read as the table it was at first: {reason_of(error)}; "
                f"repair it, take it out of the source, or keep a column of CSV as it is "
                f"written: --field NAME=COLUMN:{TEXT}"
            ) from None

    def learn(self) -> None:
        """Learn the fields from the first rows.

        Raises:
            DataError: there are none, or a column holds what a data set cannot.
        """
        parts = (batch for part in range(self.num_parts) for batch in self.batches(part))
        first = next(parts, None)
        if first is None:
            raise DataError(f"a data set needs at least one sample, {self.files[0]} has no rows")
        fields, self.sample_bytes = {}, 0
        for name, values in first.items():
            what = f"column {','.join(self.columns[name])} of {self.files[0]}"
            is_ragged = isinstance(values, list)
            one = np.asarray(values[0]) if isinstance(values, list) else values
            fields[name] = field_of(one.shape[1:], one.dtype, what, ragged=is_ragged)
            mean_length = sum(map(len, values)) / len(values) if is_ragged else 1
            self.sample_bytes += fields[name].sample_bytes * mean_length
        self.fields = fields

    def _values(self, name: str, rows: Any, path: str) -> Array | list[Array]:
        found = []
        for at in self.columns[name]:
            what = f"column {at} of {path}"
            found.append(_values_of(rows.column(at), what, self.dtypes.get(name)))
        return found[0] if len(found) == 1 else _side_by_side(self.columns[name], found, path)


def columns_of(
    names: Sequence[str], wanted: WantedFields, path: str
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the columns and the type of each field; ``a,b:f4`` puts two side by side.

    Args:
        names: of the columns that there are.
        wanted: fields.
        path: of the table, for errors.

    Raises:
        DataError: a column does not exist, or there are several of its name.
    """
    columns, dtypes = {}, {}
    for name, what in wanted.fields.items():
        listed, _, dtype = what.rpartition(":")
        if _TYPE.fullmatch(dtype) and what.rpartition(",")[2] not in names:
            dtypes[name] = dtype
        else:
            listed = what
        columns[name] = listed.split(",")
        chosen(names, {at: at for at in columns[name]}, path)
        for at in columns[name]:
            if names.count(at) > 1:
                raise DataError(
                    f"columns have different names, {path} has {names.count(at)} named {at}; "
                    f"rename them"
                )
    return columns or {name: [at] for name, at in chosen(names, {}, path).items()}, dtypes


def _values_of(column: Any, what: str, dtype: str | None) -> Array | list[Array]:
    """Return the values of a column: of texts, bytes and lists one array for each row."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if dtype is not None and (kind in _TEXTS) != (dtype == TEXT):
        raise DataError(
            f"numbers have a type such as f4, and CSV alone keeps them as text: {what} holds "
            f"{kind}, got :{dtype}; leave the type out"
        )
    if column.null_count:
        raise DataError(
            f"a sample has all its values, {what} lacks {column.null_count} of "
            f"{len(column)}; fill them, or leave the column out: --field NAME=COLUMN"
        )
    if kind in _TEXTS:
        return list(map(raw, column.cast(pa.large_binary()).to_pylist()))
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return _numbers(column, what, dtype)
    ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
    return np.split(_numbers(column.flatten(), what, dtype), ends[:-1])


def _numbers(column: Any, what: str, dtype: str | None) -> Array:
    kind, types = column.type, pa.types
    if types.is_fixed_size_list(kind):
        flat = _numbers(column.flatten(), what, dtype)
        return flat.reshape(len(column), kind.list_size, *flat.shape[1:])
    plain = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    if not plain or column.null_count:
        raise DataError(
            f"a column holds numbers, texts, or lists of numbers that all are there, {what} "
            f"holds {kind}{' with gaps' if column.null_count else ''}; convert it, or leave it "
            f"out: --field NAME=COLUMN"
        )
    values = np.asarray(column.to_numpy(zero_copy_only=False))
    return values if dtype is None else _cast(values, dtype, what)


def _cast(values: Array, dtype: str, what: str) -> Array:
    """Convert numbers; of what they are, floats lose digits at most."""
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


def _side_by_side(names: Sequence[str], columns: Sequence[Any], path: str) -> Array:
    """Return columns of numbers as one array, ``(num_rows, num_columns)``."""
    for at, values in zip(names, columns, strict=True):
        if isinstance(values, list) or values.ndim > 1:
            raise DataError(
                f"columns side by side hold one number a row, column {at} of {path} holds more; "
                f"give it a field of its own"
            )
    table = np.column_stack(columns)
    for at, whole in zip(names, columns, strict=True):
        is_cut = whole.dtype.kind in "iu" and table.dtype.kind == "f"
        if is_cut and ((whole > _LARGEST_WHOLE) | (whole < -_LARGEST_WHOLE)).any():
            raise DataError(
                f"columns side by side become one type, here {table.dtype}, which changes whole "
                f"numbers of column {at} of {path}; give it a field of its own"
            )
    return table
