"""Transforms, which convert samples of a data set to inputs of a model."""

import pickle
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

from hpctrain.core.checksum import crc32
from hpctrain.core.errors import DataError
from hpctrain.data.order.feistel import key_of
from hpctrain.data.samples import Columns, Indices, Ragged, Values

Sample = dict[str, Tensor]
Transform = Callable[[Columns], Mapping[str, Values]]
"""Function from the fields of a batch to new fields; it may change its argument in place."""
OnSample = Callable[[int], None]  # called with the index of a sample before its transform


@dataclass(frozen=True, slots=True)
class PerSample:
    """A transform that applies a function to each sample of a batch and stacks the results.

    A field becomes ``Ragged`` if its first dimension differs between samples.
    """

    function: Callable[..., Mapping[str, Any]]
    """Function from a sample, a dict of tensors by field, to another sample. With ``random``, its
    second argument is a ``numpy.random.Generator``, seeded only by seed, epoch and index of the
    sample. So the result does not depend on the number of ranks or on interruptions."""
    _: KW_ONLY
    random: bool = False  # whether the function takes a generator

    def __call__(self, columns: Columns) -> dict[str, Values]:
        """Transform a batch whose sample indices are not known.

        Raises:
            DataError: the function needs a generator.
        """
        if self.random:
            raise DataError(
                "PerSample(random=True) must get the indices of the samples, but was called "
                "without them; pass it to a Loader"
            )
        made = [self.function(sample) for sample in _samples(columns)]
        return _joined(made, columns, self.function)

    def at(
        self,
        columns: Columns,
        indices: Indices,
        epoch: int,
        seed: int,
        on_sample: OnSample | None = None,
    ) -> dict[str, Values]:
        """Transform a batch; random numbers are seeded by seed, epoch and index of each sample.

        ``on_sample`` is called with the index of each sample before its transform.
        """
        if not self.random and on_sample is None:
            return self(columns)
        pass_key, made = key_of(seed, epoch), []
        for sample, index in zip(_samples(columns), indices.tolist(), strict=True):
            if on_sample is not None:
                on_sample(index)
            own = []
            if self.random:
                philox = np.random.Philox(key=np.array([pass_key, index], np.uint64))
                own = [np.random.Generator(philox)]
            made.append(self.function(sample, *own))
        return _joined(made, columns, self.function)


def apply(
    transform: Transform | None, columns: Columns, indices: Indices, epoch: int, seed: int
) -> dict[str, Values]:
    """Apply a transform, or None, to ``columns``, the samples at ``indices``."""
    if transform is None:
        return columns
    if isinstance(transform, PerSample):
        return transform.at(columns, indices, epoch, seed)
    result = transform(columns)
    if not isinstance(result, Mapping):
        raise DataError(
            f"a transform must return tensors by field, such as {{'x': x}}, got "
            f"{type(result).__name__} of {getattr(transform, '__name__', transform)}"
        )
    return dict(result)


def _samples(columns: Columns) -> list[Sample]:
    rows = [[values[index] for index in range(len(values))] for values in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*rows, strict=True)]


def _joined(samples: list[Any], columns: Columns, function: object) -> dict[str, Values]:
    if not samples:
        return columns  # the function was not called, so its fields are unknown
    names = samples[0].keys() if isinstance(samples[0], Mapping) else ()
    if not names or any(not isinstance(s, Mapping) or s.keys() != names for s in samples):
        raise DataError(
            f"a function of PerSample must return the same fields for every sample, such as "
            f"{{'x': x}}, but {getattr(function, '__name__', function)} returned "
            f"{' and '.join(sorted({_fields(sample) for sample in samples}))}"
        )
    return {
        name: _column(name, [torch.as_tensor(sample[name]) for sample in samples])
        for name in names
    }


def _fields(sample: Any) -> str:
    is_mapping = isinstance(sample, Mapping)
    return ", ".join(map(str, sample)) if is_mapping else type(sample).__name__


def _column(name: str, values: list[Tensor]) -> Values:
    shapes = {value.shape for value in values}
    if len(shapes) == 1:
        return torch.stack(values)
    if all(value.dim() for value in values) and len({shape[1:] for shape in shapes}) == 1:
        return Ragged.of(values)
    raise DataError(
        f"samples of a batch must have equal dimensions except the first, but samples of field "
        f"{name} have the shapes {', '.join(map(str, sorted(map(tuple, shapes))))}"
    )


T = TypeVar("T")


def begin_generators(indices: Indices, epoch: int, seed: int) -> None:
    """Seed the global generators of this process from seed, epoch and sample indices.

    Call it only in worker processes, because training draws from the global generators too.
    """
    start = crc32(np.ascontiguousarray(indices).data, crc32(f"{seed} {epoch}".encode()))
    random.seed(start)
    mtrand.seed(start)  # the global generator, which transforms may use
    torch.default_generator.manual_seed(start)


@contextmanager
def refused_draws(why: str) -> Iterator[None]:
    """Raise ``DataError`` if the block draws from a global generator.

    The error names the generators, the reason ``why``, and the remedy.
    """
    before = _states()
    yield
    if drawn := _drawn(before):
        raise _refusal(drawn, why)


class ThreadDraws:
    """Detection of transforms that draw from a global generator in a thread.

    Runs with such a transform are not reproducible, because the order of the draws depends on the
    timing of the threads. Training uses the same generators, but not while the main thread waits
    for a batch. So a generator that changes during such a wait was used by a transform. Only
    transforms that run during a wait are checked; the main thread always waits for the first batch
    of an epoch.
    """

    def __init__(self) -> None:
        self._turn = 0  # odd while the main thread waits for a batch; different for each wait

    def waited(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield from ``batches``, and record when the main thread waits for the next one."""
        iterator = iter(batches)
        is_main = threading.current_thread() is threading.main_thread()
        while True:
            self._turn += is_main
            try:
                given = [next(iterator)]
            except StopIteration:
                return
            finally:
                self._turn += is_main
            yield given.pop()  # keep no reference, so that the consumer can free the batch

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise ``DataError`` if the transform in the block draws from a global generator."""
        turn = self._turn
        before = _states() if turn % 2 else {}
        yield
        drawn = _drawn(before) if self._turn == turn else []
        if drawn and self._turn == turn:  # training was waiting during the whole transform
            raise _refusal(drawn, "because threads would draw its numbers in an undefined order")


def _refusal(drawn: list[str], why: str) -> DataError:
    return DataError(
        f"a transform must not draw from the global generator of {' and '.join(drawn)}, {why}; "
        f"use a generator per sample: PerSample(function, random=True), in a configuration "
        f"data.per_sample and data.random = true; or transform single samples in processes, "
        f"which seed the global generators for each sample: PerSample(function) and workers = 1 "
        f"or more"
    )


def _drawn(before: dict[str, object]) -> list[str]:
    now = _states() if before else {}
    return [name for name, state in now.items() if state != before[name]]


_LOOK = threading.Lock()
"""Prevents a deadlock: ``get_state`` holds the lock of torch's generator, and a garbage collection
inside it can release the GIL. A second thread would then wait for that lock while it holds the
GIL."""


def _states() -> dict[str, object]:
    with _LOOK:
        of_torch = torch.default_generator.get_state().numpy().tobytes()
    return {
        "torch": of_torch,
        "numpy": pickle.dumps(mtrand.get_state(legacy=False)),
        "random": random.getstate(),
    }
