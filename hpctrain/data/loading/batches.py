"""Read what one rank needs at its next steps: the work of the loader's threads."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from hpctrain.data.batch import Batch, padded, pinned
from hpctrain.data.io.overlapped_copy import EarlyCopies, Parts
from hpctrain.data.loading.skipped import Skipped
from hpctrain.data.loading.steps import StepPart, Steps
from hpctrain.data.order.draws import ThreadDraws
from hpctrain.data.ragged import Ragged
from hpctrain.data.samples import Columns, Indices, Samples, Values
from hpctrain.data.transform import Transform, apply
from hpctrain.data.workers.pool import DecodePool


@dataclass(kw_only=True, slots=True)
class Reading:
    """How the steps of a pass are read."""

    dataset: Samples
    steps: Steps
    skipped: Skipped
    seed: int
    epoch: int
    transform: Transform | None
    pool: DecodePool | None
    is_padded: bool
    is_pinned: bool
    draws: ThreadDraws
    _early: EarlyCopies | None = field(default=None, init=False)
    """Has samples that the data set need not be asked for."""

    def begin(self) -> None:
        """Ask for what should be on its way before the first part is read."""
        is_plain = self.pool is None and not len(self.skipped)
        self._ask(0, self.steps.all_parts if self.steps.at_once and is_plain else None)

    def read(self, number: int) -> list[Batch | Exception]:
        """Return the batch of each step of a part, or what prevents it."""
        part = self.steps.part(number)
        columns = self._copied(number, part.indices)
        if number and columns is None:
            self._ask(number)
        if len(self.skipped):
            part = part.without(self.skipped)
        if len(part.sizes) == 1:
            return [self._alone(part, columns)]
        # An error belongs to one step: then they are read one by one.
        with contextlib.suppress(Exception):
            return self._batches(part, columns or self.dataset.take(part.indices))
        return [self._alone(single) for single in part.singles()]

    def _ask(self, number: int, parts: Parts | None = None) -> None:
        if self.dataset.in_memory:
            return
        with contextlib.suppress(Exception):  # told at the step that cannot be read
            if (soon := self.steps.soon(number)).size:
                self._early = self.dataset.will_need(soon, parts)

    def _copied(self, number: int, indices: Indices) -> Columns | None:
        """Return the samples of a part, if they were copied early."""
        if self._early is None:
            return None
        with contextlib.suppress(Exception):  # told by who takes it from the data set
            return self._early.take(number, lambda gaps: self.dataset.take(indices[gaps]))
        return None

    def _alone(self, part: StepPart, columns: Columns | None = None) -> Batch | Exception:
        try:
            if self.pool is None:
                columns = columns or self.dataset.take(part.indices)
                with self.draws.watched() if self.transform else contextlib.nullcontext():
                    fields = apply(self.transform, columns, part.indices, self.epoch, self.seed)
            else:
                fields = self.pool.submit(part.indices, self.epoch, self.seed).result()
            return self._finished(fields, part.sizes[0], part.num_repeated[0])
        except Exception as error:  # raised when its step is delivered
            return error

    def _batches(self, part: StepPart, columns: Columns) -> list[Batch | Exception]:
        """Cut what was read together into batches, which share its memory."""
        assert self.transform is None  # it would have a thread for each step
        cuts = zip(*(_cuts(values, part.sizes) for values in columns.values()), strict=True)
        return [
            self._finished(dict(zip(columns, values, strict=True)), size, repeated)
            for values, size, repeated in zip(cuts, part.sizes, part.num_repeated, strict=True)
        ]

    def _finished(self, fields: Columns, size: int, num_repeated: int) -> Batch:
        if self.is_padded:
            fields = padded(fields)
        if self.is_pinned:
            fields = pinned(fields)
        return Batch(fields, size, num_repeated)


def _cuts(values: Values, sizes: list[int]) -> Iterator[Values]:
    if not isinstance(values, Ragged):
        return iter(torch.split_with_sizes(values, sizes))  # without the Python of `split`
    return _ragged_cuts(values, sizes)


def _ragged_cuts(values: Ragged, sizes: list[int]) -> Iterator[Ragged]:
    start = 0
    for size in sizes:
        offsets = values.offsets[start : start + size + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        yield Ragged(values.values[first:last], offsets - first)
        start += size
