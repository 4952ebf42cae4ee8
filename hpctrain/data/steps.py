"""Indices of the samples that a rank reads, and reads ahead, in each step of an epoch."""

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
from hpctrain.data.format.dataset_manifest import merged_ranges
from hpctrain.data.mixture import Mixture
from hpctrain.data.order.order import Order, Sequential, global_order
from hpctrain.data.order.window import WindowOrder, WindowShape
from hpctrain.data.samples import Indices, Samples

OrderName = Literal["auto", "global", "window", "sequential"]

FAST_ALONE_BYTES = 100_000
"""Samples of at least this size are read as fast in random order as in blocks."""
CACHED_BYTES = GIB  # a data set up to this size stays in memory after it was read

PLANNED = 65536
"""Number of positions that are converted to samples in one call, to amortize its overhead."""
AHEAD = 8  # the read of samples starts this number of steps before they are used
_NUM_PLANS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordering:
    """Kind of sample order; ``order`` returns the order of an epoch, identical on all ranks."""

    name: Literal["global", "window", "sequential"]
    shape: WindowShape | None = None  # sizes of a window order; None for other orders

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Return the ordering that ``record()`` described.

        Raises ``KeyError``, ``TypeError`` or ``ValueError``: items are missing or invalid.
        """
        name, shape = record["order"], None
        if name == "window":
            shape = WindowShape(**{key: int(record[key]) for key in ("block", "window", "lanes")})
        elif name not in ("global", "sequential"):
            raise ValueError(f"no order {name!r}")
        return cls(name=name, shape=shape)

    def record(self) -> dict[str, Any]:
        """Return the ordering as JSON values, for the state of a loader."""
        sizes = asdict(self.shape) if self.shape else dict.fromkeys(("block", "window", "lanes"))
        return {"order": self.name, **sizes}

    @classmethod
    def choose(
        cls, name: OrderName, dataset: Samples, global_batch: int, shape: WindowShape | None
    ) -> Self:
        """Return the ordering ``name``; ``auto`` depends on the sizes of samples and data set.

        The choice does not depend on the machine. Raises ``DataError``: the arguments do not fit
        together.
        """
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
    """An immutable set of sample indices, stored as ranges and shared by threads.

    The given ranges ``[start, stop)`` may overlap.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges = merged_ranges(ranges)
        self._bounds = np.array(self.ranges, np.int64).ravel()

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def covers(self, start: int, stop: int) -> bool:
        """Return whether all of ``[start, stop)`` is skipped."""
        place = bisect_left(self.ranges, (start + 1,))
        return place > 0 and stop <= self.ranges[place - 1][1]

    def holds(self, indices: Indices) -> NDArray[np.bool_]:
        """Return, for each index, whether the sample is skipped."""
        # Each bound at an even index starts a range, and the next bound ends it.
        inside: NDArray[np.bool_] = np.searchsorted(self._bounds, indices, side="right") % 2 == 1
        return inside

    def without(self, indices: Indices) -> Indices:
        """Return the indices that are not skipped."""
        return indices[~self.holds(indices)] if self.ranges else indices


@dataclass(kw_only=True)
class Division:
    """Rules that divide an epoch into steps, and each global batch among the ranks."""

    global_batch: int  # samples per step, over all ranks
    rank: int = 0  # rank of this process; a loader with ``comm`` sets ``comm.rank``
    size: int = 1  # number of ranks; a loader with ``comm`` sets ``comm.size``
    micro_shards: int | None = None
    """Number of parts of a global batch, at least the number of ranks. The parts do not depend on
    the number of ranks, and each rank gets consecutive parts. None means one part per rank."""
    tail: Literal["short", "drop"] = "short"
    """``short``: the last samples of an epoch form a smaller batch; ``drop``: they are omitted."""

    @property
    def num_parts(self) -> int:
        """Number of parts of a global batch."""
        return self.micro_shards or self.size

    def share(self, total: int) -> slice:
        """Return the slice of this rank in a global batch of ``total`` samples.

        A rank has consecutive parts. The numbers of parts of two ranks differ by at most one.
        """
        of_all = self.num_parts
        begin, end = (of_all * rank // self.size for rank in (self.rank, self.rank + 1))
        return slice(total * begin // of_all, total * end // of_all)

    def num_steps(self, num_samples: int) -> int:
        """Return the number of steps of ``num_samples`` samples, identical on every rank."""
        full, rest = divmod(num_samples, self.global_batch)
        return full + (rest > 0 and self.tail != "drop")


class Steps:
    """Sample indices of one rank in each step of an epoch. Thread-safe.

    The samples of a global batch do not depend on the number of ranks. In a ``WindowOrder``, the
    samples of a batch are sorted by lane before each rank gets a contiguous part, so that a rank
    reads few lanes.

    ``positions`` is a range of positions up to the end of an epoch.
    """

    def __init__(self, order: Order, division: Division, positions: range) -> None:
        self._order, self._division, self._positions = order, division, positions
        self._num_steps = division.num_steps(len(positions))
        self._group = max(1, PLANNED // division.global_batch)
        self._planned = lru_cache(_NUM_PLANS)(self._plan)
        self._planning = threading.Lock()

    def __len__(self) -> int:
        return self._num_steps

    def samples(self, number: int) -> Indices:
        """Return the indices of this rank's samples in step ``number``."""
        group, place = divmod(number, self._group)
        with self._planning:  # two threads must not compute the same group
            return self._planned(group)[place]

    def soon(self, number: int) -> Indices:
        """Return the indices of the samples whose read must start before step ``number``."""
        later = number + AHEAD
        steps = range(1 if number == 0 else later, min(later + 1, len(self)))
        return np.concatenate([np.empty(0, np.int64), *map(self.samples, steps)])

    def _plan(self, group: int) -> list[Indices]:
        """Return the samples of this rank in each step of a group of consecutive steps."""
        batch = self._division.global_batch
        stop = min((group + 1) * self._group, self._num_steps)
        span = self._positions[group * self._group * batch : stop * batch]
        num_full, rest = divmod(len(span), batch)
        rows = self._mine(span.start + batch * np.arange(num_full), batch)
        (tail,) = self._mine(np.array([span.start + batch * num_full]), rest)
        samples = self._order.samples_at(np.concatenate([rows.ravel(), tail]))
        steps = [*samples[: rows.size].reshape(rows.shape), samples[rows.size :]]
        return steps[: stop - group * self._group]

    def _mine(self, starts: Indices, batch: int) -> Indices:
        """Return this rank's positions in batches that begin at ``starts``, one row per batch."""
        mine = self._division.share(batch)
        if isinstance(self._order, WindowOrder) and batch and len(starts):
            positions = starts[:, None] + np.arange(batch)
            lanes = self._order.lanes_of(positions.ravel()).reshape(positions.shape)
            by_lane = np.argsort(lanes, axis=1, kind="stable")
            return np.take_along_axis(positions, by_lane[:, mine], axis=1)
        return starts[:, None] + np.arange(mine.start, mine.stop)
