"""A rank's share of a source: contiguous, read in batches."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB
from hpctrain.data.order.order import Sequential, global_order
from hpctrain.data.packing.source import Batch, Indexed, Source, Streamed

_BATCH_BYTES = 8 * MIB
_BATCH_SAMPLES = 1024


class Share(Protocol):
    """The samples of one rank."""

    total: int | None
    """Number of samples, None where it is not known beforehand."""

    def batches(self, skip: int) -> Iterator[Batch]:
        """Read the share without its first ``skip`` samples."""


class IndexedShare:
    """A range of the positions of a source, in its own order or a shuffled one."""

    def __init__(self, source: Indexed, seed: int | None, rank: int, size: int) -> None:
        """Cut the share of ``rank``; shares differ by one sample at most."""
        num_samples = len(source)
        self._source = source
        self._is_shuffled = seed is not None
        self._order = Sequential() if seed is None else global_order(num_samples, seed, 0)
        self._start = num_samples * rank // size
        self.total: int | None = num_samples * (rank + 1) // size - self._start

    def batches(self, skip: int) -> Iterator[Batch]:
        """Read the share without its first ``skip`` samples."""
        assert self.total is not None
        stop = self._start + self.total
        step = int(_BATCH_BYTES / max(self._source.sample_bytes, 1))
        step = min(max(step, 1), _BATCH_SAMPLES)
        for start in range(self._start + skip, stop, step):
            positions = np.arange(start, min(start + step, stop), dtype=np.int64)
            indices = self._order.samples_at(positions)
            yield self._sorted(indices) if self._is_shuffled else self._source.take(indices)

    def _sorted(self, indices: NDArray[np.int64]) -> Batch:
        """Read from front to end, then bring the samples into their order."""
        order = np.argsort(indices)
        back = np.argsort(order)
        batch = self._source.take(indices[order])
        return {
            name: [rows[index] for index in back] if isinstance(rows, list) else rows[back]
            for name, rows in batch.items()
        }


class StreamedShare:
    """A run of the parts of a source."""

    def __init__(self, source: Streamed, rank: int, size: int) -> None:
        """Cut the share of ``rank``; with fewer parts than ranks some have none."""
        self._source = source
        num_parts = source.num_parts
        self._parts = range(num_parts * rank // size, num_parts * (rank + 1) // size)
        if num_parts == 1:
            self._parts = range(1 if rank == 0 else 0)
        lengths = [source.length_of(part) for part in self._parts]
        known = [length for length in lengths if length is not None]
        self.total = sum(known) if len(known) == len(lengths) else None

    def batches(self, skip: int) -> Iterator[Batch]:
        """Read the share without its first ``skip`` samples."""
        for part in self._parts:
            length = self._source.length_of(part)
            if length is not None and length <= skip:
                skip -= length
                continue
            for batch in self._source.batches(part):
                num_samples = len(next(iter(batch.values())))
                if skip < num_samples:
                    yield {name: rows[skip:] for name, rows in batch.items()}
                skip = max(skip - num_samples, 0)


def share_of(source: Source, seed: int | None, rank: int, size: int) -> Share:
    """Return what ``rank`` of ``size`` packs.

    Raises:
        DataError: a seed is given, and the source cannot be read in any order.
    """
    if isinstance(source, Indexed):
        return IndexedShare(source, seed, rank, size)
    assert isinstance(source, Streamed)
    if seed is not None:
        raise DataError(
            "samples are packed in another order where any of them can be read at any time, this "
            "source is read from front to end; leave out --shuffle, the loader shuffles"
        )
    return StreamedShare(source, rank, size)


def note_of(source: Source, size: int) -> tuple[str, ...]:
    """Say which ranks have nothing to do."""
    if isinstance(source, Streamed) and source.num_parts < size:
        num_parts = source.num_parts
        parts, packs = ("part", "packs") if num_parts == 1 else ("parts", "pack")
        return (f"the source has {num_parts} {parts} only: {num_parts} of {size} ranks {packs}",)
    return ()
