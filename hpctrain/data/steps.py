"""Samples of each step of an epoch on a rank, and the samples that it reads soon."""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.core.python_compat import Self
from hpctrain.core.units import GIB
from hpctrain.data.mixture import Mixture
from hpctrain.data.order.order import Order, Sequential, global_order
from hpctrain.data.order.window import WindowOrder, WindowShape, rank_lanes
from hpctrain.data.samples import Indices, Samples, merged

OrderName = Literal["auto", "global", "window", "sequential"]

FAST_ALONE_BYTES = 100_000
"""Samples of this size are read as fast one by one as in blocks of neighbours."""
CACHED_BYTES = GIB  # a data set of this size stays in memory once it was read

PLANNED = 65536
"""Positions that are turned into samples at a time: a call of numpy costs as much as many."""
AHEAD = 8  # steps between the request of single samples and their read, about
ASKED = 1024  # blocks that are requested together, about


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordering:
    """An order of every epoch: the same for all ranks, and after a change of their number."""

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
            raise DataError(f"order is auto, global, window or sequential, got {name!r}")
        if isinstance(dataset, Mixture):
            if name not in ("auto", "sequential"):
                raise DataError(
                    f'a mixture has an order of its own, but got order={name!r}; use "auto"'
                )
            return cls(name="sequential")
        if shape is not None and name not in ("auto", "window"):
            raise DataError(f'window= needs order="window", got order={name!r}')
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


@dataclass(frozen=True, slots=True)
class StepPart:
    """What one rank reads at once: its samples of one or several steps."""

    indices: Indices  # of all the steps, one after another
    sizes: list[int]  # samples of each step

    def singles(self) -> "list[StepPart]":
        """Return the same with each step alone."""
        pieces = np.split(self.indices, np.cumsum(self.sizes)[:-1])
        return [StepPart(piece, [size]) for piece, size in zip(pieces, self.sizes, strict=True)]

    def without(self, skipped: Skipped) -> "StepPart":
        """Return the same without some samples."""
        kept = ~skipped.holds(self.indices)
        if kept.all():
            return self
        of_steps = np.split(kept, np.cumsum(self.sizes)[:-1])
        return StepPart(self.indices[kept], [int(np.count_nonzero(one)) for one in of_steps])


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

    @property
    def own_parts(self) -> range:
        """Parts of this rank: contiguous, as many as another rank has or one more or less."""
        total = self.num_parts
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def share(self, total: int) -> slice:
        """Return which of the samples of a global batch this rank has."""
        parts = self.own_parts
        return slice(total * parts.start // self.num_parts, total * parts.stop // self.num_parts)

    def num_steps(self, num_samples: int) -> int:
        """Return the steps that ``num_samples`` make, the same number on every rank."""
        full, rest = divmod(num_samples, self.global_batch)
        return full + (rest > 0 and self.tail != "drop")


class Steps:
    """The parts of one rank, and the requests before it reads them. Thread-safe.

    A global batch is the samples at its positions, whatever the number of ranks. They are
    sorted by lane, if the order has lanes, before each rank gets a contiguous part: so a rank
    reads few of the lanes.
    """

    def __init__(
        self,
        order: Order,
        division: Division,
        positions: range,
        together: int = 1,
        num_ahead: int = 1,
    ) -> None:
        """Divide the samples at some positions, up to the end of an epoch.

        A part has ``together`` steps; the plans of ``num_ahead`` parts are kept.
        """
        self._order, self._division, self._together = order, division, together
        self._positions = positions
        self._num_steps = division.num_steps(len(positions))
        self._ahead = -(-AHEAD // together)
        self._group = max(1, PLANNED // (division.global_batch * together))
        self._num_kept = 2 + (num_ahead + self._ahead) // self._group
        self._plans: dict[int, list[StepPart]] = {}
        self._planning = threading.Lock()

    def __len__(self) -> int:
        return ceil(self._num_steps / self._together)

    def part(self, number: int) -> StepPart:
        """Return what this rank reads at once."""
        group, place = divmod(number, self._group)
        with self._planning:
            if group not in self._plans:
                steps = self._steps(group * self._group, self._group)
                indices, sizes = self._plan(steps)
                self._plans[group] = list(_cut(indices, sizes, self._together))
                while len(self._plans) > self._num_kept:
                    del self._plans[min(self._plans)]
            return self._plans[group][place]

    def soon(self, number: int) -> Indices:
        """Return the samples to request when a part is about to be read.

        Over all parts, each sample or block once. Blocks are requested a window ahead.
        """
        if isinstance(self._order, WindowOrder):
            return self._blocks_soon(self._order, number)
        later = number + self._ahead
        parts = range(1 if number == 0 else later, min(later + 1, len(self)))
        return np.concatenate([np.empty(0, np.int64), *(self.part(n).indices for n in parts)])

    def _blocks_soon(self, order: WindowOrder, number: int) -> Indices:
        division, steps = self._division, self._steps(number, 1)
        own = division.own_parts
        lanes = rank_lanes(own.start, own.stop, size=division.num_parts, lanes=order.shape.lanes)
        positions = self._positions_of(steps)
        # A part needs few new blocks, and to request them costs as much as to compute many.
        few = max(1, min(ASKED // max(1, len(lanes)), order.shape.window // 4))
        turns = range(
            order.turns_needed(positions.start, few), order.turns_needed(positions.stop, few)
        )
        if number == 0:
            begun = order.turns_begun(positions.start)
            turns = range(begun.start, max(begun.stop, turns.stop))
        blocks = order.blocks(lanes, turns)
        if number == 0:
            blocks = np.concatenate([blocks, order.rest_blocks(lanes)])
        samples = np.sort(blocks)[:, None] * order.shape.block + np.arange(order.shape.block)
        return samples[samples < self._positions.stop]

    def _steps(self, first_part: int, num_parts: int) -> range:
        start = first_part * self._together
        return range(start, min(start + num_parts * self._together, self._num_steps))

    def _positions_of(self, steps: range) -> range:
        batch = self._division.global_batch
        return self._positions[steps.start * batch : steps.stop * batch]

    def _plan(self, steps: range) -> tuple[Indices, list[int]]:
        """Return the samples of this rank in some steps, and how many each step has."""
        batch = self._division.global_batch
        positions = np.asarray(self._positions_of(steps))
        num_full = len(positions) // batch
        rows = self._mine(positions[: num_full * batch].reshape(num_full, batch))
        (tail,) = self._mine(positions[num_full * batch :][None])
        sizes = [rows.shape[1]] * num_full + [len(tail)] * (len(steps) - num_full)
        return self._order.samples_at(np.concatenate([rows.ravel(), tail])), sizes

    def _mine(self, positions: Indices) -> Indices:
        """Return what this rank has of ``(num_steps, samples of a step)`` positions."""
        if isinstance(self._order, WindowOrder) and positions.size:
            lanes = self._order.lanes_of(positions.ravel()).reshape(positions.shape)
            by_lane = np.argsort(lanes, axis=1, kind="stable")
            positions = np.take_along_axis(positions, by_lane, axis=1)
        return positions[:, self._division.share(positions.shape[1])]


def _cut(indices: Indices, sizes: list[int], together: int) -> Iterator[StepPart]:
    start = 0
    for place in range(0, len(sizes), together):
        some = sizes[place : place + together]
        yield StepPart(indices[start : start + sum(some)], some)
        start += sum(some)
