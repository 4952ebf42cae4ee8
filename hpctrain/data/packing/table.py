"""Columns of CSV and Parquet files, read some rows at a time."""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB, format_bytes
from hpctrain.data.format.layout import Field
from hpctrain.data.packing.source import (
    Batch,
    Streamed,
    WantedFields,
    chosen,
    field_of,
    needed,
)
from hpctrain.data.packing.source_columns import cast, check_numbers, side_by_side, values_of

_WHAT = "a CSV or Parquet file"
_ROWS_PER_BATCH = 4096
_TEXT = "text"
_TYPE = re.compile(rf"{_TEXT}|b1|[iu][1248]|f[248]")
_ODD_NUMBER = r"^\s*[+-]?(0\d|\d{16})"
"""Numbers that may be names, or that a float cannot hold."""


@dataclass(kw_only=True)
class Table(Streamed):
    """Rows of tables. A field is a column, or several columns of numbers side by side."""

    columns: Mapping[str, Sequence[str]]
    dtypes: Mapping[str, str]
    """Of the fields whose type was asked for; ``text`` keeps a column of CSV as it is written."""

    @abstractmethod
    def tables(self, part: int) -> Iterator[Any]:
        """Read the record batches of a part, of the wanted columns."""

    def where(self, part: int) -> Path:
        """Return the file of a part."""
        return self.files[part]

    def batches(self, part: int) -> Iterator[Batch]:
        """Read the rows of a part.

        Raises:
            DataError: the file cannot be read, or a value is missing.
        """
        path = self.where(part)
        arrow = needed("pyarrow", _WHAT)
        try:
            for table in self.tables(part):
                if table.num_rows:
                    yield self.batch(table, path)
        except (arrow.ArrowException, OSError, KeyError) as error:
            raise DataError(
                f"{path} cannot be read as the table it was at first: {reason_of(error)}; "
                f"repair it, take it out of the source, or keep a column of CSV as it is "
                f"written: --field NAME=COLUMN:{_TEXT}"
            ) from None

    def batch(self, table: Any, path: Path) -> Batch:
        """Turn rows into a batch."""
        batch: Batch = {}
        for name, columns in self.columns.items():
            dtype = self.dtypes.get(name)
            found = []
            for at in columns:
                what = f"column {at} of {path}"
                if dtype is not None:
                    check_numbers(table.column(at), what, dtype)
                values = values_of(table.column(at), what)
                found.append((at, values if dtype in (None, _TEXT) else cast(values, dtype, what)))
            batch[name] = found[0][1] if len(columns) == 1 else side_by_side(found, path)
        return batch

    def learn(self) -> None:
        """Learn the fields from the first rows.

        Raises:
            DataError: there are none, or a column holds what a data set cannot.
        """
        parts = (batch for part in range(self.num_parts) for batch in self.batches(part))
        first = next(islice(parts, 1), None)
        if first is None:
            raise DataError(f"a data set needs at least one sample, {self.files[0]} has no rows")
        fields, lengths = {}, {}
        for name, values in first.items():
            what = f"column {','.join(self.columns[name])} of {self.files[0]}"
            if isinstance(values, list):
                inner = field_of(values[0].shape[1:], values[0].dtype, what)
                fields[name] = Field.of(inner.shape, inner.dtype, ragged=True)
                lengths[name] = sum(map(len, values)) / len(values)
            else:
                fields[name] = field_of(values.shape[1:], values.dtype, what)
        self.fields, self.mean_lengths = fields, lengths


@dataclass(kw_only=True)
class Csv(Table):
    """Rows of CSV files with a line of names on top."""

    types: Any
    """Schema of the first file's first rows; the others are read as that."""

    @property
    def num_parts(self) -> int:
        """Files."""
        return len(self.files)

    def tables(self, part: int) -> Iterator[Any]:
        """Read a file as it streams by."""
        wanted = sorted({at for columns in self.columns.values() for at in columns})
        csv = needed("pyarrow.csv", _WHAT)
        options = csv.ConvertOptions(column_types=self.types, include_columns=wanted)
        blocks = _Blocks(self.files[part])
        try:
            with _opened_csv(blocks, options) as reader:
                yield from reader
        except needed("pyarrow", _WHAT).ArrowException as error:
            blocks.explain(error)
            raise
        blocks.check_end()


@dataclass(kw_only=True)
class Parquet(Table):
    """Rows of Parquet files; a part is a row group."""

    groups: Sequence[tuple[int, int, int]]
    """File, group and number of rows of each part."""

    @property
    def num_parts(self) -> int:
        """Row groups of all files."""
        return len(self.groups)

    def length_of(self, part: int) -> int:
        """Return the number of rows, which Parquet knows."""
        return self.groups[part][2]

    def where(self, part: int) -> Path:
        """Return the file of a row group."""
        return self.files[self.groups[part][0]]

    def tables(self, part: int) -> Iterator[Any]:
        """Read a row group."""
        parquet = needed("pyarrow.parquet", _WHAT)
        with parquet.ParquetFile(self.where(part)) as file:
            yield from file.iter_batches(
                _ROWS_PER_BATCH, row_groups=[self.groups[part][1]], columns=self._wanted
            )

    @cached_property
    def _wanted(self) -> list[str]:
        return sorted({at for columns in self.columns.values() for at in columns})


def open_csv(files: Sequence[Path], wanted: WantedFields) -> Csv:
    """Examine CSV files; ``.tsv`` has tabs. Numbers become numbers, all else texts, as bytes.

    Raises:
        DataError: a file cannot be read, or a column is not there.
    """
    arrow = needed("pyarrow", _WHAT)
    with _opened_csv(_Blocks(files[0]), None) as reader:
        types = reader.schema
    columns, dtypes = _columns(types.names, wanted, files[0])
    for name, dtype in dtypes.items():
        # Read as what is asked for: a float between would lose digits.
        if dtype == _TEXT or dtype[0] in "iu":
            kind = arrow.string() if dtype == _TEXT else arrow.from_numpy_dtype(np.dtype(dtype))
            for at in columns[name]:
                types = types.set(types.get_field_index(at), arrow.field(at, kind))
    found = Csv(fields={}, files=files, columns=columns, dtypes=dtypes, types=types)
    found.learn()
    found.notes = tuple(_notes(found))
    return found


def _notes(found: Csv) -> Iterator[str]:
    """Name the columns that a user may have meant otherwise, as the first rows show them."""
    arrow, compute = needed("pyarrow", _WHAT), needed("pyarrow.compute", _WHAT)
    path, kinds = found.files[0], {one.name: one.type for one in found.types}
    numbers = {
        at: name
        for name, columns in found.columns.items()
        for at in columns
        if name not in found.dtypes and kinds[at] in (arrow.int64(), arrow.float64())
    }
    for at, text in _as_written(path, list(numbers)).items():
        odd = text.filter(compute.match_substring_regex(text, _ODD_NUMBER)).to_pylist()
        kind = int if kinds[at] == arrow.int64() else float
        if one := next((one for one in odd if _is_cut(one, kind)), None):
            yield (
                f"column {at} of {path} has numbers such as {one}, packed as {kind(one)}; to "
                f"keep them as they are written: --field {numbers[at]}={at}:{_TEXT}"
            )
    floats = [name for name in numbers.values() if found.fields[name].dtype == "<f8"]
    if floats:
        first = f"{floats[0]}={','.join(found.columns[floats[0]])}"
        yield (
            f"floats of {path} are packed in 8 bytes ({', '.join(dict.fromkeys(floats))}), which "
            f"no model in float32 takes; in 4 bytes: --field {first}:f4"
        )


def _as_written(path: Path, columns: list[str]) -> dict[str, Any]:
    """Return the first rows of some columns as texts."""
    if not columns:
        return {}
    text, csv = needed("pyarrow", _WHAT).string(), needed("pyarrow.csv", _WHAT)
    options = csv.ConvertOptions(
        column_types=dict.fromkeys(columns, text), include_columns=columns
    )
    with _opened_csv(_Blocks(path), options) as reader:
        rows = reader.read_next_batch()
    return {at: rows.column(at) for at in columns}


def _is_cut(text: str, kind: type[int] | type[float]) -> bool:
    digits = text.strip().lstrip("+-")
    if digits.startswith("0"):
        return True
    return kind is float and digits.isdigit() and int(float(digits)) != int(digits)


def open_parquet(files: Sequence[Path], wanted: WantedFields) -> Parquet:
    """Examine Parquet files. Texts, bytes and lists become ragged fields.

    Raises:
        DataError: a file cannot be read, or a column is not there.
    """
    arrow, parquet = needed("pyarrow", _WHAT), needed("pyarrow.parquet", _WHAT)
    groups: list[tuple[int, int, int]] = []
    names: list[str] = []
    for number, path in enumerate(files):
        try:
            with parquet.ParquetFile(path) as file:
                names = names or file.schema_arrow.names
                groups += [
                    (number, group, file.metadata.row_group(group).num_rows)
                    for group in range(file.metadata.num_row_groups)
                ]
        except arrow.ArrowException as error:
            raise _unreadable(path, error) from None
    columns, dtypes = _columns(names, wanted, files[0])
    found = Parquet(fields={}, files=files, columns=columns, dtypes=dtypes, groups=groups)
    found.learn()
    return found


def _columns(
    names: Sequence[str], wanted: WantedFields, path: Path
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the columns and the type of each field; ``a,b:f4`` puts two side by side."""
    columns, dtypes = {}, {}
    for name, what in wanted.fields.items():
        listed, _, dtype = what.rpartition(":")
        if _TYPE.fullmatch(dtype) and what.rpartition(",")[2] not in names:
            dtypes[name] = dtype
        else:
            listed = what
        columns[name] = listed.split(",")
        chosen(names, {at: at for at in columns[name]}, str(path))
        for at in columns[name]:
            if names.count(at) > 1:
                raise DataError(
                    f"columns have different names, {path} has {names.count(at)} named {at}; "
                    f"rename them"
                )
    return columns or {name: [at] for name, at in chosen(names, {}, str(path)).items()}, dtypes


class _Blocks:
    """A file in blocks that never end between CR and LF: pyarrow drops the LF, in quotes too.

    Behind its end comes a row of more columns than there are names: pyarrow tells of it, unless
    it lies in quotes that were never closed.
    """

    closed = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        self._stream = needed("pyarrow", _WHAT).input_stream(path)
        self._held = b""
        self._is_read = self._is_done = self._is_ended = False
        self._last_row = ""

    def read(self, num_bytes: int) -> bytes:
        """Return at most so many bytes, none at the end of the file."""
        block: bytes = self._held + self._stream.read(num_bytes - len(self._held))
        if not self._last_row and block.strip(b"\xef\xbb\xbf\r\n"):
            num_columns = block.count(self.delimiter.encode()) + 1
            self._last_row = f"end of file{self.delimiter * num_columns}"
        # pyarrow reads ahead: it may stumble over the last block before it asks for more.
        self._is_read |= len(block) < num_bytes
        if not block and not self._is_done:
            self._is_done = True
            return f"\n{self._last_row}\n".encode() if self._last_row else b""
        is_last = len(block) < 2 or not block.endswith(b"\r")
        self._held = b"" if is_last else b"\r"
        return block if is_last else block[:-1]

    def meet(self, row: Any) -> str:
        """Say what becomes of a row that has another number of columns than there are names."""
        is_last = row.text == self._last_row
        self._is_ended |= is_last
        return "skip" if is_last else "error"

    def check_end(self) -> None:
        """Check, when all is read, that no quote was left open.

        Raises:
            DataError: one was, and all behind it is one value.
        """
        if not self._is_ended:
            raise self._left_open(_line_of_open_quote(self))

    def explain(self, error: BaseException) -> None:
        """Say what is wrong where pyarrow stumbles over something else on its way.

        Raises:
            DataError: a quote was left open, or a row is larger than pyarrow reads.
        """
        is_too_long = "straddling" in str(error)
        if not is_too_long and (not self._is_read or self._is_ended):
            return
        if line := _line_of_open_quote(self):
            raise self._left_open(line) from None
        if is_too_long:
            raise DataError(
                f"a row of a CSV file has at most about {format_bytes(MIB)}, {self.path} has a "
                f"larger one; keep such values in Parquet, or in files of their own"
            ) from None

    def _left_open(self, line: int | None) -> DataError:
        return DataError(
            f"a quote that opens a value is closed by another, that of line {line} of "
            f"{self.path} is not; close it, or double it where it is part of a value"
        )

    def close(self) -> None:
        """Close the file."""
        self.closed = True
        self._stream.close()


def _line_of_open_quote(file: _Blocks) -> int | None:
    """Return the line of the quote behind which all of a file is one value."""
    quoted = re.compile(rb'(?:^|(?<=[\r%b]))"(?:[^"]|"")*+("?)' % file.delimiter.encode())
    line, opened = 1, None
    with BufferedReader(needed("pyarrow", _WHAT).input_stream(file.path)) as stream:
        for text in stream:
            plain = text.removeprefix(b"\xef\xbb\xbf")
            # Within a value the line goes on as if the value began with it.
            inside = plain if opened is None else b'"' + plain
            at = next((one.start() for one in quoted.finditer(inside) if not one[1]), None)
            if at is None:
                opened = None
            elif opened is None or at > 0:
                opened = line + _num_breaks(inside[:at])
            line += _num_breaks(text)
    return opened


def _num_breaks(text: bytes) -> int:
    return len(re.findall(rb"\r\n|\r|\n", text))


def _opened_csv(blocks: _Blocks, options: Any) -> Any:
    arrow, csv = needed("pyarrow", _WHAT), needed("pyarrow.csv", _WHAT)
    parse = csv.ParseOptions(
        delimiter=blocks.delimiter, newlines_in_values=True, invalid_row_handler=blocks.meet
    )
    try:
        return csv.open_csv(blocks, parse_options=parse, convert_options=options)
    except arrow.ArrowException as error:
        blocks.explain(error)
        raise _unreadable(blocks.path, error) from None


def _unreadable(path: Path, error: BaseException) -> DataError:
    return DataError(f"{path} cannot be read as a table: {reason_of(error)}; check the file")
