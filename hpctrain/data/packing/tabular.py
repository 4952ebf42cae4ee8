"""Sources that are tables, read in blocks of rows.

The csv module splits CSV files into rows, and pyarrow parses the numbers. The ranks divide Parquet
data by row groups, and data in other formats by files.
"""

import csv
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from io import TextIOWrapper
from itertools import chain, compress
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetFile

from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB, format_bytes
from hpctrain.data.packing.files import ending_of, unpacked
from hpctrain.data.packing.source import (
    NUMBER_TYPE,
    Array,
    Batch,
    PackSource,
    WantedFields,
    cast,
    chosen,
    raw,
    readable,
)

TEXT = "text"  # type of a column of CSV that stays text

_TYPE = re.compile(rf"{TEXT}|{NUMBER_TYPE.pattern}")
_LARGEST_WHOLE = 2**53  # float64 represents all integers up to this value

Rows = Callable[[str, str | None], Array | list[Array]]
"""Function that returns the values of a column in some rows of a table. Its arguments are the name
of the column, and the requested dtype or None."""

Columns = dict[str, tuple[list[str], str | None]]
"""For each field the names of the columns that form its array, and the requested dtype or None."""


def open_table(
    files: Sequence[str],
    columns: Columns,
    parts: Sequence[tuple[int | None, str, Callable[[], Iterator[Rows]]]],
) -> PackSource:
    """Return the source for a table; a part is a number of rows, a file name and a reader."""
    reads = [(length, partial(_read, columns, path, read)) for length, path, read in parts]
    origins = {name: ",".join(names) for name, (names, _) in columns.items()}
    found = PackSource(files=files, parts=reads, origins=origins)
    first = next(chain.from_iterable(read() for _, read in reads), {})
    ragged = [name for name, values in first.items() if isinstance(values, list)]
    rows = zip(*first.values(), strict=True)
    samples = ((files[0], dict(zip(first, row, strict=True))) for row in rows)
    found.learn(samples, ragged, files[0])
    return found


def _read(columns: Columns, path: str, read: Callable[[], Iterator[Rows]]) -> Iterator[Batch]:
    for rows in read():
        batch: Batch = {}
        for name, (names, dtype) in columns.items():
            found = [rows(at, dtype) for at in names]
            batch[name] = found[0] if len(found) == 1 else _side_by_side(names, found, path)
        yield batch


def columns_of(names: Sequence[str], wanted: WantedFields, path: str) -> Columns:
    """Return the columns of each field; ``a,b:f4`` is one field with the columns a and b."""
    if not wanted.fields:
        return {name: ([at], None) for name, at in chosen(names, {}, path).items()}
    columns: Columns = {}
    for name, what in wanted.fields.items():
        listed, _, dtype = what.rpartition(":")
        is_typed = _TYPE.fullmatch(dtype) and what.rpartition(",")[2] not in names
        found = (listed if is_typed else what).split(",")
        columns[name] = found, dtype if is_typed else None
        chosen(names, {at: at for at in found}, path)
        for at in found:
            if names.count(at) > 1:
                raise DataError(
                    f"columns must have different names, but {path} has {names.count(at)} columns "
                    f"named {at}; rename them"
                )
    return columns


def _side_by_side(names: Sequence[str], columns: Sequence[Any], path: str) -> Array:
    """Return several columns of numbers as one array, ``(num_rows, num_columns)``."""
    for at, values in zip(names, columns, strict=True):
        if isinstance(values, list) or values.ndim > 1:
            raise DataError(
                f"columns of one field must have one number per row, but column {at} of {path} "
                f"has other values; give it a separate field"
            )
    table = np.column_stack(columns)
    for at, whole in zip(names, columns, strict=True):
        is_cut = whole.dtype.kind in "iu" and table.dtype.kind == "f"
        if is_cut and ((whole > _LARGEST_WHOLE) | (whole < -_LARGEST_WHOLE)).any():
            raise DataError(
                f"the common type of columns of one field must represent all their values, but "
                f"{table.dtype} rounds integers in column {at} of {path}; give it a separate "
                f"field"
            )
    return table


_MAX_VALUE_BYTES = MIB
_BLOCK_BYTES = MIB
_BOM = "\xef\xbb\xbf"
_GAPS = {"", "#N/A", "#N/A N/A", "#NA", "N/A", "NA", "NULL", "n/a", "null"}
_NANS = {"NaN", "nan", "-NaN", "-nan"}
"""Texts that are NaN if a float dtype is requested, and mark a missing value otherwise."""
_GAPS |= _NANS | {"1.#IND", "1.#QNAN", "-1.#IND", "-1.#QNAN"}
"""Texts that mark a missing value in a column of numbers."""
_NO_NUMBER = re.compile(r"[ \t]*[+-]?(0x|nan\()", re.IGNORECASE)
"""Beginning of texts that pyarrow parses as numbers, but that are not numbers in a table."""
_PADDED = re.compile(r"[ \t]*[+-]?0\d")
"""Beginning of numbers with leading zeros, which may be identifiers."""
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*\Z", re.IGNORECASE)
_SEPARATOR = re.compile(r"[;|\t]")


class CsvBlock(NamedTuple):
    """Consecutive rows of a CSV file, as columns of texts."""

    path: str
    names: list[str]
    columns: list[tuple[str, ...]]  # values as text, one character per byte (latin-1)

    def column(self, name: str) -> tuple[str, ...]:
        """Return the values of a column."""
        chosen(self.names, {name: name}, self.path)
        return self.columns[self.names.index(name)]


def open_csv(files: Sequence[str], wanted: WantedFields) -> PackSource:
    """Return the source for CSV files; the separator of ``.tsv`` is a tab.

    Columns of numbers become fields of numbers, all other columns become bytes.
    """
    first = next(_blocks(files[0]), None)
    if first is None:
        raise DataError(f"a data set must have at least one sample, but {files[0]} has no rows")
    columns = columns_of(first.names, wanted, files[0])
    kinds = {at: _kind_of(first.column(at)) for at in first.names}
    padded = {at for at in kinds if any(map(_PADDED.match, first.column(at)))}
    learnt = Learnt(kinds, padded, is_all=not wanted.fields)
    parts = [(None, path, partial(_rows_of, learnt, path)) for path in files]
    found = open_table(files, columns, parts)
    found.notes = tuple(_notes(columns, kinds, first))
    return found


class Learnt(NamedTuple):
    """Types of columns, determined from the first rows, and whether all columns are packed."""

    kinds: Mapping[str, str]
    padded: Collection[str]  # columns with leading zeros, such as 007; the user gets a note
    is_all: bool


def _rows_of(learnt: Learnt, path: str) -> Iterator[Rows]:
    for block in _blocks(path):
        yield partial(_values_of, block, learnt)


def _values_of(block: CsvBlock, learnt: Learnt, at: str, dtype: str | None) -> Array | list[Array]:
    texts, kind = block.column(at), learnt.kinds[at]
    if dtype is not None and (dtype[0] not in "bf" or kind == TEXT):
        kind = dtype  # a conversion to float first would lose digits
    if kind == TEXT:
        return [raw(text.encode("latin-1")) for text in texts]
    if dtype and dtype[0] == "f" and kind == "i8" and not _NANS.isdisjoint(texts):
        kind = dtype
    is_exact = dtype is None  # a request for floats accepts rounded integers
    values, what = _numbers(texts, kind, is_exact=is_exact), f"column {at} of {block.path}"
    if values is None:
        odd = next(text for text in texts if _numbers([text], kind, is_exact=is_exact) is None)
        floats = is_exact and _numbers([odd], "f8", is_exact=False) is not None
        as_floats = f"pack floats: {_options(block, learnt, at, 'f8')}, or " if floats else ""
        raise DataError(
            f"all values of a CSV column must have the type of its first rows, or the type that "
            f"--field names, but {what} has {odd!r}, which {dtype or kind} cannot represent; "
            f"repair it, leave the column out, {as_floats}keep its text: "
            f"{_options(block, learnt, at, TEXT)}"
        )
    if is_exact and at not in learnt.padded and (odd := next(filter(_PADDED.match, texts), "")):
        raise DataError(
            f"numbers of a CSV column must have leading zeros in the first rows too, or in no "
            f"row, but {what} has {odd!r} further on, whose zeros would be lost; keep its text: "
            f"{_options(block, learnt, at, TEXT)}, or pack the number: "
            f"{_options(block, learnt, at, learnt.kinds[at])}"
        )
    return values if dtype is None else cast(values, dtype, what)


_MOST_OPTIONS = 12


def _options(block: CsvBlock, learnt: Learnt, at: str, kind: str) -> str:
    """Return ``--field`` options that set the type of the column ``at`` and keep other columns."""
    fields = chosen(block.names, {}, block.path) if learnt.is_all else {"NAME": at}
    named = [f"--field {name}={quote(to)}" for name, to in fields.items() if to != at]
    name = next((name for name, to in fields.items() if to == at), "NAME")
    own = f"--field {name}={quote(f'{at}:{kind}')}"
    if len(named) > _MOST_OPTIONS:
        return f"{own}, and --field NAME=COLUMN for each other column that is to be packed"
    return " ".join([own, *named])


def _kind_of(texts: Sequence[str]) -> str:
    """Return the type that fits all values of a column."""
    there = [text for text in texts if text not in _GAPS]
    return next((kind for kind in ("i8", "b1", "f8") if _numbers(there, kind) is not None), TEXT)


def _numbers(texts: Sequence[str], kind: str, *, is_exact: bool = True) -> Array | None:
    """Return a column as numbers, or None if a value is not a number; floats are float64.

    Booleans must be words, not 0 or 1. With ``is_exact``, the result is also None if float64
    cannot represent an integer of the column exactly.
    """
    gaps = _GAPS if is_exact or kind[0] != "f" else _GAPS - _NANS
    if not gaps.isdisjoint(texts) or any(map(_NO_NUMBER.match, texts)):
        return None
    texts = [text.strip(" \t") for text in texts]
    if kind == "b1" and not {"0", "1"}.isdisjoint(texts):
        return None
    try:
        found = pa.array(texts, pa.string()).cast(
            pa.from_numpy_dtype(np.dtype("f8" if kind[0] == "f" else kind))
        )
    except pa.ArrowInvalid:
        return None
    values = np.asarray(found.to_numpy(zero_copy_only=False))
    if kind[0] != "f":
        return values
    if any(text[-1:] in "0123456789." for text in compress(texts, np.isinf(values))):
        return None  # a finite number that is too large
    large = compress(texts, np.abs(values) >= _LARGEST_WHOLE) if is_exact else ()
    return None if any(map(_is_rounded, large)) else values


def _is_rounded(text: str) -> bool:
    """Return whether a text is an integer that float64 cannot represent."""
    digits = text.lstrip("+-")
    return digits.isdigit() and int(float(digits)) != int(digits)


def _notes(columns: Columns, kinds: Mapping[str, str], first: CsvBlock) -> Iterator[str]:
    """Yield notes about columns whose type in the first rows may be unintended."""
    names = first.names
    if all(map(_NUMBER.match, names)):
        yield (
            f"the first line of {first.path}, {', '.join(names[:4])}, is read as names of "
            f"columns; if it is a sample, insert a line of names before it"
        )
    if len(names) == 1 and (separator := _SEPARATOR.search(names[0])):
        yield (
            f"{first.path} has one column, {names[0]!r}, because values must be separated by "
            f"commas, or by tabs in a .tsv file; convert the file if {separator[0]!r} separates "
            f"its columns"
        )
    free = [(name, names) for name, (names, dtype) in columns.items() if dtype is None]
    types: dict[str, type[int] | type[float]] = {"i8": int, "f8": float}
    for name, at in ((name, at) for name, names in free for at in names if kinds[at] in types):
        kind = types[kinds[at]]
        if odd := next(filter(_PADDED.match, first.column(at)), None):
            yield (
                f"column {at} of {first.path} has numbers such as {odd.strip()}, packed as "
                f"{kind(odd)}; to keep their text: --field {name}={at}:{TEXT}"
            )


def _blocks(path: str) -> Iterator[CsvBlock]:
    """Read a file in blocks of whole rows."""
    # The limit applies to the whole process. Its default is 128 KiB.
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_VALUE_BYTES))
    errors = (OSError, EOFError, zlib.error)
    with (
        readable(path, "a table", *errors),
        unpacked(path) as file,
        TextIOWrapper(file, "latin-1", newline="") as text,
    ):
        lines = chain([next(text, "").removeprefix(_BOM)], text)
        rows = csv.reader(lines, delimiter="\t" if ending_of(path) == ".tsv" else ",", strict=True)
        line = 1
        try:
            names = _names(next(filter(None, rows), []), path)
            waiting: list[list[str]] = []
            num_bytes = 0
            line = rows.line_num + 1
            for row in rows:
                if row and len(row) != len(names):
                    raise DataError(
                        f"a row must have a value for each of {len(names)} columns, but the row "
                        f"in line {line} of {path} has {len(row)} values; repair it"
                    )
                line = rows.line_num + 1
                if row:
                    waiting.append(row)
                    num_bytes += sum(map(len, row)) + len(row)
                if num_bytes >= _BLOCK_BYTES:
                    yield CsvBlock(path, names, list(zip(*waiting, strict=True)))
                    waiting, num_bytes = [], 0
        except csv.Error as error:
            raise DataError(
                f"a quoted value must end with a quote, and a value must have at most "
                f"{format_bytes(_MAX_VALUE_BYTES)}, but reading the row in line {line} of {path} "
                f"failed: {error}; close the quote, double it inside a value, or use Parquet"
            ) from None
        if waiting:
            yield CsvBlock(path, names, list(zip(*waiting, strict=True)))


def _names(row: list[str], path: str) -> list[str]:
    try:
        return [name.encode("latin-1").decode() for name in row]
    except UnicodeDecodeError as error:
        raise DataError(
            f"names of columns must be UTF-8, but the names in {path} are not: {error}; convert "
            f"the file to UTF-8"
        ) from None


_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_ROWS_PER_BATCH = 4096
_MAGIC = b"ARROW1"  # first bytes of the Arrow file format, which the stream format lacks


def open_parquet(files: Sequence[str], wanted: WantedFields) -> PackSource:
    """Return the source for Parquet files; texts, bytes and lists become ragged fields.

    Raises ``DataError``: a file cannot be read, or a column does not exist.
    """
    names, parts = {}, []
    for path in files:
        with readable(path, "a table", pa.ArrowException), ParquetFile(path) as file:
            names[path] = file.schema_arrow.names
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            parts += [(path, group.num_rows, [number]) for number, group in enumerate(groups)]
    return _columns_opened(names, parts, wanted)


def open_arrow(files: Sequence[str], wanted: WantedFields) -> PackSource:
    """Return the source for Arrow files, such as those of ``datasets``; see ``open_parquet``."""
    names, parts = {}, []
    for path in files:
        with readable(path, "a table", pa.ArrowException):
            table = _mapped(path)
        names[path] = table.schema.names
        parts.append((path, table.num_rows, None))
    return _columns_opened(names, parts, wanted)


def _columns_opened(
    names: dict[str, list[str]],
    parts: Sequence[tuple[str, int, list[int] | None]],
    wanted: WantedFields,
) -> PackSource:
    """Return the source for tables; a part is ``(file, number of rows, row groups or None)``."""
    files = [*names]
    columns = columns_of(names[files[0]], wanted, files[0])
    used = sorted({at for names, _ in columns.values() for at in names})
    for path in files:
        chosen(names[path], {at: at for at in used}, path)
    reads = [(count, path, partial(_rows_in, path, used, groups)) for path, count, groups in parts]
    return open_table(files, columns, reads)


def _mapped(path: str) -> Any:
    """Map an Arrow file, in the file or the stream format, into memory as a table."""
    source = pa.memory_map(path)
    is_file = source.read(len(_MAGIC)) == _MAGIC
    source.seek(0)
    return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).read_all()


def _rows_in(path: str, columns: list[str], groups: list[int] | None) -> Iterator[Rows]:
    """Read a table, or row groups of a Parquet file."""
    with (
        readable(path, "the table that was examined", pa.ArrowException, OSError),
        ExitStack() as stack,
    ):
        if groups is None:
            batches = _mapped(path).select(columns).to_batches(_ROWS_PER_BATCH)
        else:
            file = stack.enter_context(ParquetFile(path))
            batches = file.iter_batches(_ROWS_PER_BATCH, row_groups=groups, columns=columns)
        for rows in batches:
            if rows.num_rows:
                yield partial(_column_of, rows, path)


def _column_of(rows: Any, path: str, at: str, dtype: str | None) -> Array | list[Array]:
    """Return the values of a column; texts, bytes and lists as one array per row."""
    column, what = rows.column(at), f"column {at} of {path}"
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if dtype is not None and (kind in _TEXTS) != (dtype == TEXT):
        raise DataError(
            f"a type in --field must be a number type such as f4 for a column of numbers, and be "
            f"left out for other columns, but {what} holds {kind}, got :{dtype}; leave the type "
            f"out"
        )
    if column.null_count:
        raise DataError(
            f"a column must not have missing values, but {what} has {column.null_count} among "
            f"{len(column)} rows; fill them, or leave the column out: --field NAME=COLUMN"
        )
    if kind in _TEXTS:
        return list(map(raw, column.cast(pa.large_binary()).to_pylist()))
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return _column_numbers(column, what, dtype)
    ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
    return np.split(_column_numbers(column.flatten(), what, dtype), ends[:-1])


def _column_numbers(column: Any, what: str, dtype: str | None) -> Array:
    kind, types = column.type, pa.types
    if types.is_fixed_size_list(kind):
        flat = _column_numbers(column.flatten(), what, dtype)
        return flat.reshape(len(column), kind.list_size, *flat.shape[1:])
    plain = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    if not plain or column.null_count:
        raise DataError(
            f"a column must hold numbers, texts, or complete lists of numbers, but {what} holds "
            f"{kind}{' with missing values' if column.null_count else ''}; convert it, or leave "
            f"it out: --field NAME=COLUMN"
        )
    values = np.asarray(column.to_numpy(zero_copy_only=False))
    return values if dtype is None else cast(values, dtype, what)
