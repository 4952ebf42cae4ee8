"""``Mixture``, a sequence of samples from several data sets in fixed proportions."""

import hashlib
import heapq
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.format.dataset_manifest import Field
from hpctrain.data.order.order import Order, Sequential, global_order
from hpctrain.data.samples import Columns, Indices, Ragged, Samples, Values, file_of

PERIOD = 1 << 16
"""Length of the repeated pattern of sources; weights are rounded to multiples of 1/PERIOD."""
_PATTERN = 2
"""Version of the rule that orders the sources. The uuid depends on the version, because another
rule gives other samples."""


class Mixture:
    """Endless sequence of samples from several shuffled data sets in fixed proportions.

    Among the first ``n`` samples, the number of samples from a data set differs from its share of
    ``n`` by less than one; in any range of ``n`` samples, by less than two. Each data set has
    separate epochs, in which every sample occurs once. An epoch of the mixture has
    ``len(mixture)`` samples, and the next epoch continues the sequence. The order is not stored:
    the sample at a position is computed from the position.

    Args:
        weights: share of each data set in the samples; only their proportions count.
        length: samples of an epoch; by default the number of samples of all data sets together.
        seed: seed of the order in which each data set is read.

    Raises:
        DataError: weights or length are invalid, or the fields of the data sets differ.

    Differs from an ordinary data set: indices may exceed ``len``, and a loader does not shuffle,
    because the sequence is shuffled already.
    """

    block_size = 1  # neighbouring samples are unrelated, so blocks have one sample

    def __init__(
        self,
        weights: Mapping[Samples, float] | Iterable[tuple[Samples, float]],
        length: int | None = None,
        *,
        seed: int = 0,
    ) -> None:
        pairs: list[tuple[Samples, float]] = list(
            weights.items() if isinstance(weights, Mapping) else weights
        )
        self.sources: list[Samples] = [source for source, _ in pairs]
        self._check(pairs, length)
        self.fields = self.sources[0].fields
        self._seed = seed
        self._length = sum(map(len, self.sources)) if length is None else length
        self._counts = _whole(np.array([weight for _, weight in pairs], float))
        self._pattern = _pattern(tuple(self._counts.tolist()))
        self._before = np.zeros(PERIOD, np.int64)
        for number in range(len(pairs)):
            here = self._pattern == number
            self._before[here] = np.arange(np.count_nonzero(here))
        sizes = [source.sample_bytes for source in self.sources]
        self.sample_bytes = float(np.dot(sizes, self._counts)) / PERIOD
        counts = self._counts.tolist()
        ids = [[each.uuid, count] for each, count in zip(self.sources, counts, strict=True)]
        text = json.dumps(["mixture", _PATTERN, ids, self._length, self._seed])
        self.uuid = hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def in_memory(self) -> bool:
        """Whether all samples are in memory."""
        return all(source.in_memory for source in self.sources)

    def __len__(self) -> int:
        return self._length

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch of the mixture."""
        return Sequential(epoch * self._length)

    def take(self, indices: Indices) -> Columns:
        """Gather samples; indices start at 0 and have no upper limit.

        Raises:
            CorruptError: a sample is damaged; the error has its index in the mixture.
        """
        wanted = np.asarray(indices, np.int64)
        parts: list[Columns] = []
        places: list[Indices] = []
        for source, samples, here in self._parts(wanted):
            try:
                parts.append(source.take(samples))
            except CorruptError as error:
                bad = (error.start <= samples) & (samples < error.stop)
                index = int(wanted[here[np.argmax(bad)]])
                raise CorruptError(str(error), index, index + 1) from error
            places.append(here)
        if not parts:
            return self.sources[0].take(wanted)
        back = np.argsort(np.concatenate(places))
        return {name: _gathered([part[name] for part in parts], back) for name in self.fields}

    def will_need(self, indices: Indices) -> None:
        """Start to read samples into memory, and return immediately."""
        for source, samples, _ in self._parts(np.asarray(indices, np.int64)):
            source.will_need(samples)

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return, for each index, its source and the number of earlier samples of that source.

        A source is given by its index, from 0.
        """
        periods, inside = np.divmod(indices, PERIOD)
        numbers = self._pattern[inside]
        return numbers, periods * self._counts[numbers] + self._before[inside]

    def file_of(self, index: int) -> str | None:
        """Return the path of the file that holds a sample; None for data without files."""
        ((source, samples, _),) = self._parts(np.array([index]))
        return file_of(source, int(samples[0]))

    def _parts(self, indices: Indices) -> Iterator[tuple[Samples, Indices, Indices]]:
        """Yield each source, the samples to read from it, and their places in ``indices``."""
        numbers, draws = self.locate(indices)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            source = self.sources[number]
            epochs, positions = np.divmod(draws[places], len(source))
            samples = np.empty_like(positions)
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                # The order depends on ``number``, so that sources of equal size have different
                # orders.
                order = _order(len(source), self._seed, epoch * len(self.sources) + number)
                samples[here] = order.samples_at(positions[here])
            yield source, samples, places

    def _check(self, pairs: list[tuple[Samples, float]], length: int | None) -> None:
        if not pairs or any(not 0 < weight < float("inf") for _, weight in pairs):
            raise DataError(
                f"a mixture must have data sets with positive weights, got "
                f"{[weight for _, weight in pairs]}"
            )
        if length is not None and length < 1:
            raise DataError(f"an epoch of a mixture must have at least 1 sample, got {length}")
        for source in self.sources:
            if not len(source):
                raise DataError(
                    f"data sets of a mixture must not be empty, but {source} has no samples"
                )
            first = self.sources[0].fields
            if _seen(source.fields) != _seen(first):
                raise DataError(
                    f"data sets of a mixture must have the same fields, got "
                    f"{dict(first)} and {dict(source.fields)}"
                )


_order = lru_cache(maxsize=64)(global_order)


def _seen(fields: Mapping[str, Field]) -> list[tuple[Any, ...]]:
    """Return name, shape, dtype and raggedness of each field, to compare data sets."""
    return [(name, field.shape, field.dtype, field.ragged) for name, field in fields.items()]


def _whole(weights: NDArray[np.float64]) -> Indices:
    """Round weights to counts that sum to PERIOD; the largest remainders are rounded up."""
    exact = weights / weights.sum() * PERIOD
    counts: Indices = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: PERIOD - int(counts.sum())]] += 1
    if not counts.all():
        raise DataError(
            f"weights of a mixture must be at least 1/{PERIOD} of their sum, got "
            f"{weights.tolist()}"
        )
    return counts


@lru_cache(maxsize=16)
def _pattern(counts: tuple[int, ...]) -> Indices:
    """Return, for each position of a period, the index of the source.

    Let ``total`` be the sum of ``counts``. Sample k of a source with count c must have a position
    between k * total / c and (k + 1) * total / c. At each position, the candidates are the samples
    whose interval has begun. The candidate whose interval ends first is chosen (earliest deadline
    first). Then every sample is within its interval.

    Source: Baruah, Cohen, Plaxton and Varvel 1996, "Proportionate progress".
    """
    common = math.gcd(*counts)
    parts = [count // common for count in counts]
    total = sum(parts)
    turns = sorted(
        (k * total // part, -(-(k + 1) * total // part), source)
        for source, part in enumerate(parts)
        for k in range(part)
    )
    turns.reverse()
    begun: list[tuple[int, int]] = []
    pattern = np.empty(total, np.int64)
    for place in range(total):
        while turns and turns[-1][0] <= place:
            heapq.heappush(begun, turns.pop()[1:])
        pattern[place] = heapq.heappop(begun)[1]
    return np.tile(pattern, common)


def _gathered(parts: list[Values], back: Indices) -> Values:
    """Concatenate ``parts``, and return the samples at the indices ``back`` of the result."""
    if len(parts) == 1:
        return parts[0]  # its places are already in order
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if ragged:
        samples = [part[index] for part in ragged for index in range(len(part))]
        return Ragged.of([samples[index] for index in back.tolist()])
    return torch.cat([part for part in parts if isinstance(part, Tensor)])[torch.from_numpy(back)]
