"""CSV files: Python's csv module finds the rows, pyarrow makes columns of them."""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO, TextIOWrapper
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv

from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB, format_bytes
from hpctrain.data.packing.files import ending_of, unpacked
from hpctrain.data.packing.source import WantedFields, readable
from hpctrain.data.packing.table import TEXT, UNREADABLE, Part, Table, columns_of

_MAX_VALUE_BYTES = MIB
_BLOCK_BYTES = MIB
_BOM = "\xef\xbb\xbf"
_ODD_NUMBER = re.compile(r"[+-]?(0\d|\d{16})")
"""Numbers that may be names, or that a float cannot hold."""


class Block(NamedTuple):
    """Whole rows of a file."""

    path: str
    names: list[str]
    """Of the columns."""
    text: bytes
    num_rows: int

    def table(self, **options: Any) -> Any:
        """Convert the columns; ``options`` are those of ``pyarrow.csv.ConvertOptions``."""
        table = read_csv(
            BytesIO(self.text),
            # One block: pyarrow drops the LF of a CR LF between two of them, in quotes too.
            ReadOptions(column_names=self.names, block_size=len(self.text) + 1),
            ParseOptions(delimiter=_delimiter(self.path), newlines_in_values=True),
            ConvertOptions(**options),
        )
        if table.num_rows != self.num_rows:
            raise DataError(
                f"{self.path} can be read in two ways, as {self.num_rows} rows and as "
                f"{table.num_rows}, from {self.text[:80]!r} on; write it anew"
            )
        return table


@dataclass(kw_only=True)
class Csv(Table):
    """Rows of CSV files with a line of names on top."""

    types: Any
    """Schema of the first file's first rows; the others are read as that."""

    def record_batches(self, part: Part) -> Iterator[Any]:
        """Read a file as it streams by."""
        for block in _blocks(part.path):
            table = block.table(column_types=self.types, include_columns=self.wanted)
            yield from table.to_batches()


def open_csv(files: Sequence[str], wanted: WantedFields) -> Csv:
    """Examine CSV files; ``.tsv`` has tabs. Numbers become numbers, all else texts, as bytes.

    Raises:
        DataError: a file cannot be read, or a column is not there.
    """
    path = files[0]
    with readable(path, "a table", *UNREADABLE):
        first = next(_blocks(path), None)
        if first is None:
            raise DataError(f"a data set needs at least one sample, {path} has no rows")
        types = first.table().schema
    columns, dtypes = columns_of(types.names, wanted, path)
    for name, dtype in dtypes.items():
        # Read as what is asked for: a float between would lose digits.
        if dtype == TEXT or dtype[0] in "iu":
            kind = pa.binary() if dtype == TEXT else pa.from_numpy_dtype(np.dtype(dtype))
            for at in columns[name]:
                types = types.set(types.get_field_index(at), pa.field(at, kind))
    parts = list(map(Part, files))
    found = Csv(fields={}, files=files, columns=columns, dtypes=dtypes, parts=parts, types=types)
    found.learn_rows()
    found.notes = tuple(_notes(found, first))
    return found


def _notes(found: Csv, first: Block) -> Iterator[str]:
    """Name the columns that a user may have meant otherwise, as the first rows show them."""
    kinds = {pa.int64(): int, pa.float64(): float}
    numbers = {
        at: name
        for name, columns in found.columns.items()
        for at in columns
        if name not in found.dtypes and found.types.field(at).type in kinds
    }
    written = first.table(column_types=dict.fromkeys(numbers, pa.string()))
    for at, name in numbers.items():
        kind = kinds[found.types.field(at).type]
        texts = (text.strip() for text in written.column(at).to_pylist())
        if odd := next((text for text in texts if _is_cut(text, kind)), None):
            yield (
                f"column {at} of {first.path} has numbers such as {odd}, packed as {kind(odd)}; "
                f"to keep them as they are written: --field {name}={at}:{TEXT}"
            )
    floats = [name for name in numbers.values() if found.fields[name].dtype == "<f8"]
    if floats:
        field = f"{floats[0]}={','.join(found.columns[floats[0]])}"
        yield (
            f"floats of {first.path} are packed in 8 bytes ({', '.join(dict.fromkeys(floats))}), "
            f"which no model in float32 takes; in 4 bytes: --field {field}:f4"
        )


def _is_cut(text: str, kind: type[int] | type[float]) -> bool:
    """Say whether a number no longer is as it was written."""
    if not _ODD_NUMBER.match(text):
        return False
    digits = text.lstrip("+-")
    cut = kind is float and digits.isdigit() and int(float(digits)) != int(digits)
    return cut or digits.startswith("0")


def _blocks(path: str) -> Iterator[Block]:
    """Read a file in blocks of whole rows.

    Raises:
        DataError: a quote is not closed, a value is too large, or a row has too few or too many.
    """
    # It is a limit of the process, and the usual one is an eighth of this.
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_VALUE_BYTES))
    names: list[str] = []
    lines: list[str] = []  # of the block
    num_rows, num_bytes, line = 0, 0, 1
    with unpacked(path) as file, TextIOWrapper(file, "latin-1", newline="") as text:
        rows = csv.reader(_kept(text, lines), delimiter=_delimiter(path), strict=True)
        try:
            for row in rows:
                if not row:
                    lines.pop()
                elif not names:
                    names = _names(row, path)
                    lines.clear()
                elif len(row) != len(names):
                    raise DataError(
                        f"a row has a value for each of {len(names)} columns, that of line {line} "
                        f"of {path}, which cannot be read, has {len(row)}; repair it"
                    )
                else:
                    num_rows += 1
                    num_bytes += sum(map(len, row)) + len(row)
                line = rows.line_num + 1
                if num_bytes >= _BLOCK_BYTES:
                    yield Block(path, names, "".join(lines).encode("latin-1"), num_rows)
                    lines.clear()
                    num_rows = num_bytes = 0
        except csv.Error as error:
            raise DataError(
                f"a quote that opens a value is closed by another at its end, and a value has at "
                f"most {format_bytes(_MAX_VALUE_BYTES)}: the row of line {line} of {path} is not "
                f"so ({error}); close the quote, double it where it is part of the value, or keep "
                f"large values in Parquet"
            ) from None
    if num_rows:
        yield Block(path, names, "".join(lines).encode("latin-1"), num_rows)


def _kept(lines: Iterator[str], kept: list[str]) -> Iterator[str]:
    first = next(lines, "")
    for line in chain([first.removeprefix(_BOM)], lines):
        kept.append(line)
        yield line


def _names(row: list[str], path: str) -> list[str]:
    try:
        return [name.encode("latin-1").decode() for name in row]
    except UnicodeDecodeError as error:
        raise DataError(
            f"columns have names in UTF-8, those of {path} are not: {error}; convert the file"
        ) from None


def _delimiter(path: str) -> str:
    return "\t" if ending_of(path) == ".tsv" else ","
