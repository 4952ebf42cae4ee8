"""Parquet files: each row group is a part."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow.parquet import ParquetFile

from hpctrain.data.packing.source import WantedFields, readable
from hpctrain.data.packing.table import Table, columns_of

_ROWS_PER_BATCH = 4096


@dataclass(kw_only=True)
class Parquet(Table):
    """Rows of Parquet files."""

    groups: Sequence[tuple[str, int, int]]
    """File, group and number of rows of each part."""

    @property
    def num_parts(self) -> int:
        """Row groups of all files."""
        return len(self.groups)

    def length_of(self, part: int) -> int:
        """Return the number of rows, which Parquet knows."""
        return self.groups[part][2]

    def path_of(self, part: int) -> str:
        """Return the file of a row group."""
        return self.groups[part][0]

    def record_batches(self, part: int) -> Iterator[Any]:
        """Read a row group."""
        path, group, _ = self.groups[part]
        with ParquetFile(path) as file:
            yield from file.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=self.wanted)


def open_parquet(files: Sequence[str], wanted: WantedFields) -> Parquet:
    """Examine Parquet files. Texts, bytes and lists become ragged fields.

    Raises:
        DataError: a file cannot be read, or a column is not there.
    """
    groups: list[tuple[str, int, int]] = []
    names: list[str] = []
    for path in files:
        with readable(path, "a table", pa.ArrowException), ParquetFile(path) as file:
            names = names or file.schema_arrow.names
            inside = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            groups += [(path, number, group.num_rows) for number, group in enumerate(inside)]
    columns, dtypes = columns_of(names, wanted, files[0])
    found = Parquet(fields={}, files=files, columns=columns, dtypes=dtypes, groups=groups)
    found.learn()
    return found
