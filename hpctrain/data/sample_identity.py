"""Identity of the samples of a data set, as far as it is known without reading one."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hpctrain.core.checksum import crc32

_MOST_NUMBERS = 1 << 16
"""How many numbers of an array are looked at; another split or order differs in the first ones."""
_MOST_DEPTH = 4


def identity_of(data: object) -> dict[str, str]:
    """Return checksums of the integers that a data set holds, by attribute. Not collective.

    Indices of a ``Subset``, labels, tables of positions: a random split or order with another seed
    differs in them. Floating point numbers may round differently from node to node, and samples
    that are read may be augmented at random: they are left out.
    """
    return dict(_checksums(data, type(data).__name__, _MOST_DEPTH))


def identity_of_samples(samples: Iterable[object]) -> str:
    """Return a checksum of the texts and integers of some samples, but those of pixels."""
    total = 0
    for sample in samples:
        held = sample.values() if isinstance(sample, Mapping) else sample
        for value in held if isinstance(held, Iterable) and not isinstance(held, str) else [held]:
            numbers = _integers(value)
            if numbers is not None and numbers.dtype != np.uint8:
                total = crc32(numbers[:_MOST_NUMBERS].tobytes(), total)
            elif isinstance(value, int | str):
                total = crc32(repr(value).encode(), total)
    return f"{total:08x}"


def _checksums(value: object, name: str, depth: int) -> Iterator[tuple[str, str]]:
    numbers = _integers(value)
    if numbers is not None:
        yield name, f"{crc32(numbers[:_MOST_NUMBERS].tobytes(), len(numbers)):08x}"
    elif depth and _holds_samples(value):
        for key, held in sorted(_parts(value)):
            yield from _checksums(held, f"{name}.{key}", depth - 1)


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, DataLoader):
        yield "dataset", value.dataset
    elif isinstance(value, list | tuple):
        yield from ((str(number), held) for number, held in enumerate(value[:8]))
    else:
        yield from vars(value).items()


def _holds_samples(value: object) -> bool:
    """Say whether to look into it: a data set, a loader, or a few of them in a list."""
    if isinstance(value, list | tuple):
        return any(isinstance(held, Tensor | np.ndarray) or _is_data(held) for held in value[:8])
    return _is_data(value)


def _is_data(value: object) -> bool:
    kind = type(value)
    return hasattr(value, "__dict__") and (
        hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")
    )


def _integers(value: object) -> np.ndarray | None:
    """Return a flat array of integers, if that is what it is."""
    if isinstance(value, Tensor):
        dense = value.layout == torch.strided and value.is_cpu
        value = value.detach().numpy() if dense and not value.is_floating_point() else None
    elif isinstance(value, list | range) and value and type(value[0]) in (int, np.int64):
        try:
            value = np.asarray(value[:_MOST_NUMBERS], dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            return None
    if isinstance(value, np.ndarray) and value.dtype.kind in "iub":
        return value.reshape(-1)
    return None
