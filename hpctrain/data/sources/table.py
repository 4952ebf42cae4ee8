"""Columns of CSV and Parquet files, read some rows at a time."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.format.layout import Field
from hpctrain.data.sources.columns import values_of
from hpctrain.data.sources.source import (
    Batch,
    Streamed,
    Wanted,
    chosen,
    field_of,
    needed,
)
from hpctrain.errors import DataError
from hpctrain.files import reason_of

_WHAT = "a CSV or Parquet file"
_ROWS_PER_BATCH = 4096


@dataclass(kw_only=True)
class Table(Streamed):
    """Rows of tables. A field is a column, or several columns of numbers side by side."""

    columns: Mapping[str, Sequence[str]]

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
                f"repair it, or take it out of the source"
            ) from None

    def batch(self, table: Any, path: Path) -> Batch:
        """Turn rows into a batch."""
        batch: Batch = {}
        for name, columns in self.columns.items():
            found = [values_of(table.column(at), f"column {at} of {path}") for at in columns]
            if len(columns) == 1:
                batch[name] = found[0]
                continue
            for at, values in zip(columns, found, strict=True):
                if isinstance(values, list) or values.ndim > 1:
                    raise DataError(
                        f"columns side by side hold one number a row, column {at} of {path} "
                        f"holds more; give it a field of its own"
                    )
            batch[name] = np.column_stack([np.asarray(values) for values in found])
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
        with _opened_csv(self.files[part], options) as reader:
            yield from reader


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


def open_csv(files: Sequence[Path], wanted: Wanted) -> Csv:
    """Examine CSV files; ``.tsv`` has tabs. Numbers become numbers, all else texts, as bytes.

    Raises:
        DataError: a file cannot be read, or a column is not there.
    """
    with _opened_csv(files[0], None) as reader:
        types = reader.schema
    found = Csv(
        fields={}, files=files, columns=_columns(types.names, wanted, files[0]), types=types
    )
    found.learn()
    return found


def open_parquet(files: Sequence[Path], wanted: Wanted) -> Parquet:
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
    found = Parquet(
        fields={}, files=files, columns=_columns(names, wanted, files[0]), groups=groups
    )
    found.learn()
    return found


def _columns(names: Sequence[str], wanted: Wanted, path: Path) -> dict[str, list[str]]:
    """Return the columns of each field; ``a,b,c`` puts three side by side."""
    asked = {name: at.split(",") for name, at in wanted.fields.items()}
    for columns in asked.values():
        chosen(names, {at: at for at in columns}, str(path))
    return asked or {name: [at] for name, at in chosen(names, {}, str(path)).items()}


def _opened_csv(path: Path, options: Any) -> Any:
    arrow, csv = needed("pyarrow", _WHAT), needed("pyarrow.csv", _WHAT)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    parse = csv.ParseOptions(delimiter=delimiter)
    try:
        return csv.open_csv(path, parse_options=parse, convert_options=options)
    except arrow.ArrowException as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: BaseException) -> DataError:
    return DataError(f"{path} cannot be read as a table: {reason_of(error)}; check the file")
