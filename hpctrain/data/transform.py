"""From the values of a data set to those that a model wants."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.core.errors import DataError
from hpctrain.data.order.feistel import key_of
from hpctrain.data.ragged import Ragged, Values
from hpctrain.data.samples import Columns, Indices

Sample = dict[str, Tensor]
Transform = Callable[[Columns], Mapping[str, Values]]
"""From the values of a batch by field to others; it may change them in place."""
OnSample = Callable[[int], None]
"""Is told the index of each sample whose work begins."""


@dataclass(frozen=True, slots=True)
class PerSample:
    """A transform made of a function of one sample; what it returns is stacked again.

    Fields whose lengths differ between samples become ``Ragged``.
    """

    function: Callable[..., Mapping[str, Any]]
    """From a sample, tensors by field, to another. With ``random``, its second argument is a
    ``numpy.random.Generator``, a function of (seed, epoch, sample) only: a sample is changed in
    the same way on any number of ranks, and after any interruption."""
    _: KW_ONLY
    random: bool = False
    """Whether the function takes a generator."""

    def __call__(self, columns: Columns) -> dict[str, Values]:
        """Transform a batch of which nobody knows which samples are in it.

        Raises:
            DataError: the function needs a generator.
        """
        if self.random:
            raise DataError(
                "PerSample(random=True) needs the numbers of the samples; give it to a Loader"
            )
        return _joined([self.function(sample) for sample in _samples(columns)], columns)

    def at(
        self,
        columns: Columns,
        indices: Indices,
        epoch: int,
        seed: int,
        on_sample: OnSample | None = None,
    ) -> dict[str, Values]:
        """Transform samples, whose random numbers begin with seed, epoch and number.

        ``on_sample`` is told of each sample before.
        """
        if not self.random and on_sample is None:
            return self(columns)
        pass_key, made = key_of(seed, epoch), []
        for sample, index in zip(_samples(columns), indices.tolist(), strict=True):
            if on_sample is not None:
                on_sample(index)
            own = [_generator(pass_key, index)] if self.random else []
            made.append(self.function(sample, *own))
        return _joined(made, columns)


def apply(
    transform: Transform | None, columns: Columns, indices: Indices, epoch: int, seed: int
) -> dict[str, Values]:
    """Transform the samples ``indices``, if there is a transform.

    Raises:
        DataError: the transform returns no values by name.
    """
    if transform is None:
        return columns
    if isinstance(transform, PerSample):
        return transform.at(columns, indices, epoch, seed)
    result = transform(columns)
    if not isinstance(result, Mapping):
        raise DataError(
            f"a transform returns tensors by field, such as {{'x': x}}, "
            f"got {type(result).__name__}"
        )
    return dict(result)


def _samples(columns: Columns) -> list[Sample]:
    rows = [[values[index] for index in range(len(values))] for values in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*rows, strict=True)]


def _generator(pass_key: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([pass_key, index], np.uint64)))


def _joined(samples: list[Mapping[str, Any]], columns: Columns) -> dict[str, Values]:
    if not samples:
        return columns  # the function was not called, so nobody knows what it returns
    names = samples[0].keys()
    if any(sample.keys() != names for sample in samples):
        raise DataError("a function of PerSample returns the same fields for every sample")
    return {
        name: _column(name, [torch.as_tensor(sample[name]) for sample in samples])
        for name in names
    }


def _column(name: str, values: list[Tensor]) -> Values:
    shapes = {value.shape for value in values}
    if len(shapes) == 1:
        return torch.stack(values)
    if all(value.dim() for value in values) and len({shape[1:] for shape in shapes}) == 1:
        return Ragged.of(values)
    raise DataError(
        f"samples of a batch may differ in their first dimension only, "
        f"field {name} has {', '.join(map(str, sorted(map(tuple, shapes))))}"
    )
