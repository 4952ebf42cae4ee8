"""Columns of tables of pyarrow, read some rows at a time; of Parquet, each row group is a part."""

import re
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetFile

from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import DataError
from hpctrain.data.packing.source import (
    NUM_EXAMINED,
    Array,
    Batch,
    Streamed,
    WantedFields,
    chosen,
    fields_of,
    raw,
    readable,
)

TEXT = "text"
"""Type of a column of CSV that stays as it is written."""

UNREADABLE = (pa.ArrowException, OSError, EOFError, KeyError, zlib.error)
"""What a damaged file leads to, in pyarrow and in what unpacks it."""

_TYPE = re.compile(rf"{TEXT}|b1|[iu][1248]|f[248]")
_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_ROWS_PER_BATCH = 4096
_LARGEST_WHOLE = 2**53
"""Up to which floats of 8 bytes hold all whole numbers."""


class Part(NamedTuple):
    """Rows that are read by themselves."""

    path: str
    num_rows: int | None = None
    """None where the file does not tell."""
    group: int = 0
    """Of a Parquet file."""


@dataclass(kw_only=True)
class Table(Streamed):
    """Rows of tables. A field is a column, or several columns of numbers side by side."""

    columns: Mapping[str, Sequence[str]]
    dtypes: Mapping[str, str]
    """Of the fields whose type was asked for."""
    parts: Sequence[Part]

    @abstractmethod
    def record_batches(self, part: Part) -> Iterator[Any]:
        """Read the record batches of a part, with the wanted columns."""

    @property
    def num_parts(self) -> int:
        """Files, or what they are made of."""
        return len(self.parts)

    def length_of(self, part: int) -> int | None:
        """Return the number of rows, which Parquet knows."""
        return self.parts[part].num_rows

    @property
    def wanted(self) -> list[str]:
        """Names of the columns that are packed."""
        return sorted(set(chain.from_iterable(self.columns.values())))

    def batches(self, part: int) -> Iterator[Batch]:
        """Read the rows of a part.

        Raises:
            DataError: the file cannot be read, or a value is missing.
        """
        path = self.parts[part].path
        try:
            for rows in self.record_batches(self.parts[part]):
                if rows.num_rows:
                    yield {name: self._values(name, rows, path) for name in self.columns}
        except UNREADABLE as error:
            raise DataError(
                f"{path} cannot be read as the table it was at first: {reason_of(error)}; "
                f"repair it, take it out of the source, or keep a column of CSV as it is "
                f"written: --field NAME=COLUMN:{TEXT}"
            ) from None

    def learn_rows(self) -> None:
        """Learn the fields from the first rows.

        Raises:
            DataError: there are none, or a column holds what a data set cannot.
        """
        first = next(chain.from_iterable(map(self.batches, range(self.num_parts))), {})
        ragged = [name for name, values in first.items() if isinstance(values, list)]
        rows = islice(zip(*first.values(), strict=True), NUM_EXAMINED)
        samples = [(self.files[0], dict(zip(first, row, strict=True))) for row in rows]
        self.fields, self.sample_bytes = fields_of(samples, ragged, self.files[0])

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


class Parquet(Table):
    """Rows of Parquet files, whose row groups are parts."""

    def record_batches(self, part: Part) -> Iterator[Any]:
        """Read a row group."""
        with ParquetFile(part.path) as file:
            groups = [part.group]
            yield from file.iter_batches(_ROWS_PER_BATCH, row_groups=groups, columns=self.wanted)


def open_parquet(files: Sequence[str], wanted: WantedFields) -> Parquet:
    """Examine Parquet files. Texts, bytes and lists become ragged fields.

    Raises:
        DataError: a file cannot be read, or a column is not there.
    """
    parts: list[Part] = []
    names: list[str] = []
    for path in files:
        with readable(path, "a table", pa.ArrowException), ParquetFile(path) as file:
            names = names or file.schema_arrow.names
            inside = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            parts += [Part(path, group.num_rows, index) for index, group in enumerate(inside)]
    columns, dtypes = columns_of(names, wanted, files[0])
    found = Parquet(fields={}, files=files, columns=columns, dtypes=dtypes, parts=parts)
    found.learn_rows()
    return found
