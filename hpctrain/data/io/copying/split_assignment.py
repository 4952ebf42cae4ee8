"""The parts of a split for the samples of one rank, in their order."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import Manifest
from hpctrain.data.format.rows import Rows, count
from hpctrain.data.io.copying.copy import in_turns, stream
from hpctrain.data.io.copying.parts import Group, Shares, sizes_of
from hpctrain.data.tools.faults import Range

_MOST_VALUES = 1 << 16


class Deal:
    """Tells the parts of the samples of this rank, in their order."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        mine: Range,
        comm: Communicator,
        by: str | None,
    ) -> None:
        """Count the samples of each value. Collective."""
        self._by = by
        counts: Counter[int] = Counter()
        if by is None:
            self._totals = Counter({0: manifest.num_samples})
            return
        _check_field(manifest, by)

        def tally() -> Iterator[None]:
            for _, rows in stream(directory, manifest, *mine, fields=(by,)):
                values, numbers = np.unique(rows[by], return_counts=True)
                counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
                if len(counts) > _MOST_VALUES:
                    raise DataError(
                        f"a split by values takes a field with at most {_MOST_VALUES} values, "
                        f"{by} has more"
                    )
                yield

        in_turns(comm, tally())
        all_counts = comm.allgather_object(counts)
        self._totals = sum(all_counts, Counter())
        self._seen = sum(all_counts[: comm.rank], Counter())

    def draw(self, shares: Shares, seed: int) -> None:
        """Draw the parts of each value.

        Raises:
            DataError: a part would get no sample.
        """
        totals = sorted(self._totals.items())
        sizes = sizes_of([number for _, number in totals], shares)
        for name, size in zip(shares, sizes.sum(0).tolist(), strict=True):
            if not size:
                raise DataError(
                    f"each part gets at least one sample, {name} gets none of "
                    f"{sum(self._totals.values())}; give it a larger share"
                )
        self._groups = {
            value: Group(row, seed, number)
            for number, ((value, _), row) in enumerate(zip(totals, sizes, strict=True))
        }

    def parts_of(self, first: int, rows: Rows) -> NDArray[np.int64]:
        """Return the number of the part of each of the next samples."""
        if self._by is None:
            return self._groups[0].part_of(np.arange(first, first + count(rows)))
        values = np.asarray(rows[self._by])
        parts = np.empty(len(values), np.int64)
        order = np.argsort(values, kind="stable")
        found, starts = np.unique(values[order], return_index=True)
        for value, here in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
            numbers = self._seen[value] + np.arange(len(here))
            parts[here] = self._groups[value].part_of(numbers)
            self._seen[value] += len(here)
        return parts


def _check_field(manifest: Manifest, name: str) -> None:
    field = manifest.fields.get(name)
    if field is None:
        raise DataError(f"a split is by a field, {name} is none of {', '.join(manifest.fields)}")
    if field.ragged or field.shape or np.dtype(field.dtype).kind not in "biu":
        raise DataError(
            f"a split is by an integer field with one number for each sample, {name} has shape "
            f"{field.shape} and dtype {field.dtype}{', ragged' if field.ragged else ''}"
        )
