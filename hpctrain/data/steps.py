"""Samples of each step of an epoch on a rank, and the samples that it reads soon."""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.core.python_compat import Self
from hpctrain.core.units import GIB
from hpctrain.data.mixture import Mixture
from hpctrain.data.order.order import Order, Sequential, global_order
from hpctrain.data.order.window import WindowOrder, WindowShape
from hpctrain.data.sample_ranges import merged
from hpctrain.data.samples import Indices, Samples

OrderName = Literal["auto", "global", "window", "sequential"]

FAST_ALONE_BYTES = 100_000
"""Samples of this size are read as fast one by one as in blocks of neighbours."""
CACHED_BYTES = GIB  # a data set of this size stays in memory once it was read

PLANNED = 65536
"""Positions that are turned into samples at a time: a call of numpy costs as much as many."""
AHEAD = 8  # steps between the request of samples and their read
_NUM_PLANS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordering:
    """The order of each epoch: identical on all ranks, and for any number of ranks."""

    name: Literal["global", "window", "sequential"]
    shape: WindowShape | None = None  # of a window order

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Read what ``record`` returns, among other things.

        Raises ``KeyError, TypeError, ValueError``: the record is not complete.
        """
        name, shape = record["order"], None
        if name == "window":
            shape = WindowShape(**{key: int(record[key]) for key in ("block", "window", "lanes")})
        elif name not in ("global", "sequential"):
            raise ValueError(f"no order {name!r}")
        return cls(name=name, shape=shape)

    def record(self) -> dict[str, Any]:
        """Return the order in types of JSON."""
        sizes = asdict(self.shape) if self.shape else dict.fromkeys(("block", "window", "lanes"))
        return {"order": self.name, **sizes}

    @classmethod
    def choose(
        cls, name: OrderName, dataset: Samples, global_batch: int, shape: WindowShape | None
    ) -> Self:
        """Choose an order by the sizes of samples and data set, never by the machine."""
        if name not in ("auto", "global", "window", "sequential"):
            raise DataError(f"order must be auto, global, window or sequential, got {name!r}")
        if isinstance(dataset, Mixture):
            if name not in ("auto", "sequential"):
                raise DataError(
                    f'a mixture must be read in its own order, got order={name!r}; use "auto"'
                )
            return cls(name="sequential")
        if shape is not None and name not in ("auto", "window"):
            raise DataError(f'window= must be used with order="window", got order={name!r}')
        usual = WindowShape.of(global_batch, dataset.sample_bytes, dataset.block_size)
        if name == "auto" and shape is None:
            is_global = (
                dataset.sample_bytes >= FAST_ALONE_BYTES
                or len(dataset) * dataset.sample_bytes <= CACHED_BYTES
                or len(dataset) <= usual.num_samples
            )
            name = "global" if is_global else "window"
        if name in ("global", "sequential"):
            return cls(name=name)
        return cls(name="window", shape=shape or usual)

    def order(self, dataset: Samples, seed: int, epoch: int) -> Order:
        """Return the order of an epoch."""
        if isinstance(dataset, Mixture):
            return dataset.order(epoch)
        if self.name == "sequential":
            return Sequential()
        if self.shape is not None:
            return WindowOrder(len(dataset), seed, epoch, self.shape)
        return global_order(len(dataset), seed, epoch)


class Skipped:
    """A set of samples as ranges; never changed, so that threads may share it."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """Join ranges ``[start, stop)``, which may overlap and touch."""
        self.ranges = merged(ranges)
        self._bounds = np.array(self.ranges, np.int64).ravel()

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def covers(self, start: int, stop: int) -> bool:
        """Return whether all of ``[start, stop)`` is skipped."""
        place = bisect_left(self.ranges, (start + 1,))
        return place > 0 and stop <= self.ranges[place - 1][1]

    def holds(self, indices: Indices) -> NDArray[np.bool_]:
        """Return for each index whether it is skipped."""
        # A range begins at each even bound and ends at the next, odd one.
        inside: NDArray[np.bool_] = np.searchsorted(self._bounds, indices, side="right") % 2 == 1
        return inside

    def without(self, indices: Indices) -> Indices:
        """Return the indices that are not skipped."""
        return indices[~self.holds(indices)] if self.ranges else indices


@dataclass(kw_only=True)
class Division:
    """Division of the samples of an epoch among steps, and of each step among the ranks."""

    global_batch: int  # samples per step, of all ranks together
    rank: int = 0  # rank of this process; that of ``comm``, if it is given
    size: int = 1  # number of ranks; that of ``comm``, if it is given
    micro_shards: int | None = None
    """Fixed parts of a global batch, at least as many as ranks, of which each rank gets some in a
    row, so that the parts do not depend on the number of ranks; None for one part per rank."""
    tail: Literal["short", "drop"] = "short"
    """The last samples make a ``short`` step, or none: ``drop``."""

    @property
    def num_parts(self) -> int:
        """Parts of a global batch."""
        return self.micro_shards or self.size

    def share(self, total: int) -> slice:
        """Return which of the samples of a global batch this rank has.

        The parts of a rank are contiguous, as many as another rank has or one more or less.
        """
        of_all = self.num_parts
        begin, end = (of_all * rank // self.size for rank in (self.rank, self.rank + 1))
        return slice(total * begin // of_all, total * end // of_all)

    def num_steps(self, num_samples: int) -> int:
        """Return the steps that ``num_samples`` make, the same number on every rank."""
        full, rest = divmod(num_samples, self.global_batch)
        return full + (rest > 0 and self.tail != "drop")


class Steps:
    """Samples of one rank in each step, and samples that it requests ahead. Thread-safe.

    The samples of a global batch do not depend on the number of ranks. If the order has lanes,
    samples are sorted by lane before each rank gets a contiguous part, so a rank reads few lanes.
    """

    def __init__(self, order: Order, division: Division, positions: range) -> None:
        """Divide the samples at some positions, up to the end of an epoch."""
        self._order, self._division, self._positions = order, division, positions
        self._num_steps = division.num_steps(len(positions))
        self._group = max(1, PLANNED // division.global_batch)
        self._planned = lru_cache(_NUM_PLANS)(self._plan)
        self._planning = threading.Lock()

    def __len__(self) -> int:
        return self._num_steps

    def samples(self, number: int) -> Indices:
        """Return the samples of this rank in a step."""
        group, place = divmod(number, self._group)
        with self._planning:  # so that no other thread computes the same
            return self._planned(group)[place]

    def soon(self, number: int) -> Indices:
        """Return the samples to request when a step is about to be read."""
        later = number + AHEAD
        steps = range(1 if number == 0 else later, min(later + 1, len(self)))
        return np.concatenate([np.empty(0, np.int64), *map(self.samples, steps)])

    def _plan(self, group: int) -> list[Indices]:
        """Return the samples of this rank in each of some steps."""
        batch = self._division.global_batch
        stop = min((group + 1) * self._group, self._num_steps)
        positions = np.asarray(self._positions[group * self._group * batch : stop * batch])
        num_full = len(positions) // batch
        rows = self._mine(positions[: num_full * batch].reshape(num_full, batch))
        (tail,) = self._mine(positions[num_full * batch :][None])
        samples = self._order.samples_at(np.concatenate([rows.ravel(), tail]))
        steps = [*samples[: rows.size].reshape(rows.shape), samples[rows.size :]]
        return steps[: stop - group * self._group]

    def _mine(self, positions: Indices) -> Indices:
        """Return this rank's part of positions ``(num_steps, samples of a step)``."""
        if isinstance(self._order, WindowOrder) and positions.size:
            lanes = self._order.lanes_of(positions.ravel()).reshape(positions.shape)
            by_lane = np.argsort(lanes, axis=1, kind="stable")
            positions = np.take_along_axis(positions, by_lane, axis=1)
        return positions[:, self._division.share(positions.shape[1])]
