"""Transforms: from the values of a data set to the inputs of a model."""

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
"""From the values of a batch by field to others; it may change them in place."""
OnSample = Callable[[int], None]  # gets the index of each sample whose work begins


@dataclass(frozen=True, slots=True)
class PerSample:
    """A transform made of a function of one sample; its results are stacked again.

    Fields whose lengths differ between samples become ``Ragged``.
    """

    function: Callable[..., Mapping[str, Any]]
    """From a sample, tensors by field, to another. With ``random``, its second argument is a
    ``numpy.random.Generator``, a function of (seed, epoch, sample) only: a sample is changed
    identically on any number of ranks, and after any interruption."""
    _: KW_ONLY
    random: bool = False  # whether the function takes a generator

    def __call__(self, columns: Columns) -> dict[str, Values]:
        """Transform a batch without the indices of its samples.

        Raises:
            DataError: the function needs a generator.
        """
        if self.random:
            raise DataError(
                "PerSample(random=True) must get the numbers of the samples; pass it to a Loader"
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
        """Transform samples with random numbers seeded by seed, epoch and index.

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
    """Transform the samples ``indices``, if there is a transform."""
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
        f"samples of a batch must have equal dimensions except the first, but field {name} "
        f"has {', '.join(map(str, sorted(map(tuple, shapes))))}"
    )


T = TypeVar("T")


def begin_generators(indices: Indices, epoch: int, seed: int) -> None:
    """Seed the global generators from seed, epoch and samples.

    Only for worker processes: the training process draws from the same generators.
    """
    start = crc32(np.ascontiguousarray(indices).data, crc32(f"{seed} {epoch}".encode()))
    random.seed(start)
    mtrand.seed(start)  # the global generator, which transforms may use
    torch.default_generator.manual_seed(start)


@contextmanager
def refused_draws(why: str) -> Iterator[None]:
    """Raise if a global generator was drawn from inside.

    Raises ``DataError``: names the generators, the reason ``why``, and the remedy.
    """
    before = _states()
    yield
    if drawn := _drawn(before):
        raise _refusal(drawn, why)


class ThreadDraws:
    """Detects transforms in threads that draw from a global generator, which training also uses.

    The order in which threads draw is random, so runs would differ. While the main thread waits
    for a batch only transforms run, so a generator that changes meanwhile was used by a transform.
    All transforms before the first batch of a pass are checked, and later ones if training waits
    for them. Transforms are not checked if a thread other than the main thread waits.
    """

    def __init__(self) -> None:
        self._turn = 0  # odd while the main thread waits for a batch, another number each time

    def waited(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield ``batches``, and note when they are waited for."""
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
            yield given.pop()  # the consumer alone has it

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run a transform inside. Raises ``DataError``: it has drawn from a global generator."""
        turn = self._turn
        before = _states() if turn % 2 else {}
        yield
        drawn = _drawn(before) if self._turn == turn else []
        if drawn and self._turn == turn:  # the training was not at work while we looked
            raise _refusal(drawn, "from which threads would draw in random order")


def _refusal(drawn: list[str], why: str) -> DataError:
    return DataError(
        f"a transform must not draw from the global generator of {' and '.join(drawn)}, {why}; "
        f"take a generator of each sample: PerSample(function, random=True), in a configuration "
        f"data.per_sample and data.random = true; or transform one sample at a time in processes, "
        f"whose generators restart with each: PerSample(function) and workers = 1 or more"
    )


def _drawn(before: dict[str, object]) -> list[str]:
    now = _states() if before else {}
    return [name for name, state in now.items() if state != before[name]]


_LOOK = threading.Lock()
"""Torch holds its generator's lock when a garbage collection lets another thread run Python: that
one must not ask for the same state meanwhile, as it would wait for the lock with Python's own."""


def _states() -> dict[str, object]:
    with _LOOK:
        of_torch = torch.default_generator.get_state().numpy().tobytes()
    return {
        "torch": of_torch,
        "numpy": pickle.dumps(mtrand.get_state(legacy=False)),
        "random": random.getstate(),
    }
