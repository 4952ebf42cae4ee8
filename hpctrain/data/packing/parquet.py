"""Parquet and Arrow files, whose columns pyarrow reads; a part is a row group, or a file."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetFile

from hpctrain.core.errors import DataError
from hpctrain.data.packing.source import Array, Source, WantedFields, chosen, raw, readable
from hpctrain.data.packing.table import TEXT, Rows, cast, columns_of, open_table

_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_ROWS_PER_BATCH = 4096
_MAGIC = b"ARROW1"  # begins a file of Arrow, and no stream


def open_parquet(files: Sequence[str], wanted: WantedFields) -> Source:
    """Examine Parquet files. Texts, bytes and lists become ragged fields.

    Raises ``DataError``: a file cannot be read, or a column is not there.
    """
    parts: list[_Part] = []
    names: dict[str, list[str]] = {}
    for path in files:
        with readable(path, "a table", pa.ArrowException), ParquetFile(path) as file:
            names[path] = file.schema_arrow.names
            inside = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            parts += [(path, group.num_rows, {"group": n}) for n, group in enumerate(inside)]
    return _opened(names, parts, _rows_of_group, wanted)


def open_arrow(files: Sequence[str], wanted: WantedFields) -> Source:
    """Examine Arrow files, as ``datasets`` writes them too; as ``open_parquet``."""
    parts: list[_Part] = []
    names: dict[str, list[str]] = {}
    for path in files:
        with readable(path, "a table", pa.ArrowException):
            table = _mapped(path)
        names[path] = table.schema.names
        parts.append((path, table.num_rows, {}))
    return _opened(names, parts, _rows_of_file, wanted)


_Part = tuple[str, int, dict[str, int]]  # its file, its rows, and where they are


def _opened(
    names: dict[str, list[str]],
    parts: Sequence[_Part],
    read: Callable[..., Iterator[Rows]],
    wanted: WantedFields,
) -> Source:
    files = [*names]
    columns = columns_of(names[files[0]], wanted, files[0])
    used = sorted({at for names, _ in columns.values() for at in names})
    for path in files:
        chosen(names[path], {at: at for at in used}, path)
    reads = [(count, path, partial(read, path, used, **where)) for path, count, where in parts]
    return open_table(files, columns, reads)


def _mapped(path: str) -> Any:
    """Map a table into memory, a file of Arrow or a stream."""
    source = pa.memory_map(path)
    is_file = source.read(len(_MAGIC)) == _MAGIC
    source.seek(0)
    return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).read_all()


def _rows_of_file(path: str, columns: list[str]) -> Iterator[Rows]:
    with readable(path, "the table it was at first", pa.ArrowException, OSError):
        for rows in _mapped(path).select(columns).to_batches(_ROWS_PER_BATCH):
            if rows.num_rows:
                yield partial(_values_of, rows, path)


def _rows_of_group(path: str, columns: list[str], group: int) -> Iterator[Rows]:
    errors = (pa.ArrowException, OSError)
    with readable(path, "the table it was at first", *errors), ParquetFile(path) as file:
        for rows in file.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=columns):
            if rows.num_rows:
                yield partial(_values_of, rows, path)


def _values_of(rows: Any, path: str, at: str, dtype: str | None) -> Array | list[Array]:
    """Return the values of a column: of texts, bytes and lists one array for each row."""
    column, what = rows.column(at), f"column {at} of {path}"
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
    return values if dtype is None else cast(values, dtype, what)
