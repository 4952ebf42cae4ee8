"""Protocol of data sets, and the batches of samples that they return."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from hpctrain.core.errors import DataError
from hpctrain.core.python_compat import Self
from hpctrain.data.format.dataset_manifest import Field


@dataclass(frozen=True, slots=True)
class Ragged:
    """Samples that differ in their first dimension, joined in one tensor with offsets."""

    values: Tensor  # ``(total, *shape)``: the samples, concatenated
    offsets: Tensor
    """``(num_samples + 1,)`` int64: sample i is ``values[offsets[i]:offsets[i + 1]]``."""

    @classmethod
    def of(cls, samples: Sequence[Tensor]) -> Self:
        """Join tensors of different lengths, one per sample.

        Args:
            samples: at least one, each ``(length, *shape)``, of the same dtype and device.
        """
        lengths = torch.tensor([0, *map(len, samples)], dtype=torch.int64)
        return cls(torch.cat(list(samples)), lengths.cumsum(0))

    @property
    def lengths(self) -> Tensor:
        """Length of each sample, ``(num_samples,)`` int64."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Tensor:
        if not -len(self) <= index < len(self):
            raise IndexError(f"an index must be from {-len(self)} to {len(self) - 1}, got {index}")
        index %= len(self)
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def padded(self, fill: float = 0, length: int | None = None) -> Tensor:
        """Return one tensor ``(num_samples, length, *shape)``, padded at the end of samples.

        Args:
            fill: value after the end of a sample.
            length: length of every row; by default the length of the longest sample.

        Raises:
            DataError: a sample is longer than ``length``.
        """
        longest = int(self.lengths.max()) if len(self) else 0
        length = longest if length is None else length
        if longest > length:
            raise DataError(
                f"samples must not be longer than {length}, but one has {longest} rows; use "
                f"length={longest}, or cut the samples first"
            )
        shape = (len(self), length, *self.values.shape[1:])
        rows = self.values.new_full(shape, fill)
        if self.values.numel():
            inside = torch.arange(length, device=self.values.device) < self.lengths[:, None]
            rows[inside] = self.values[int(self.offsets[0]) : int(self.offsets[-1])]
        return rows

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return the samples on a device."""
        return type(self)(
            self.values.to(device, non_blocking=non_blocking),
            self.offsets.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Self:
        """Return a copy of the samples in pinned memory."""
        return type(self)(self.values.pin_memory(), self.offsets.pin_memory())


Values = Tensor | Ragged
"""The samples of a field in a batch: a tensor ``(num_samples, *shape)``, or a ``Ragged``."""


Indices = NDArray[np.int64]
Columns = dict[str, Values]
"""Samples by field name."""


class Samples(Protocol):
    """Protocol of data sets: samples by index, which several threads may read concurrently."""

    @property
    def uuid(self) -> str:
        """Identifier of these samples in this order."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """Fields of a sample."""

    @property
    def block_size(self) -> int:
        """Number of neighbouring samples that are read together: a checksum block or a chunk."""

    @property
    def sample_bytes(self) -> float:
        """Mean size of a sample in bytes, all fields together."""

    @property
    def in_memory(self) -> bool:
        """Whether all samples are in memory, so that ``take`` does not read from a disk."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def take(self, indices: Indices) -> Columns:
        """Gather samples.

        Raises:
            CorruptError: some samples are damaged; the error has a range of their indices.
        """

    def will_need(self, indices: Indices) -> None:
        """Start to read samples into memory, and return immediately."""


def file_of(samples: Samples, index: int) -> str | None:
    """Return the path of the file that holds a sample; None for data without files."""
    tell = getattr(samples, "file_of", None)
    return None if tell is None else tell(index)


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of a global batch.

    Read the fields with ``x, y = batch``, ``batch.x`` or ``batch["x"]``.
    """

    fields: Mapping[str, Values]
    """Values by name, in the order of the data set or of the result of the transform."""
    num_samples: int  # number of samples of this rank; may be 0 in the short batch of an epoch

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """Return the batch on a device.

        With ``non_blocking`` and pinned memory, the call does not wait for the copy.
        """
        moved = {
            name: values.to(device, non_blocking=non_blocking)
            for name, values in self.fields.items()
        }
        return replace(self, fields=moved)

    def __iter__(self) -> Iterator[Values]:
        return iter(self.fields.values())

    def __getitem__(self, name: str) -> Values:
        return self.fields[name]

    def __getattr__(self, name: str) -> Values:
        # During unpickling the batch has no fields yet, and looking them up would recurse.
        if name != "fields" and name in self.fields:
            return self.fields[name]
        raise AttributeError(
            f"the name of a field must be one of {', '.join(self.fields)}, got {name!r}"
        )


class Indexable:
    """Base class of data sets that implements indexing; ``dataset[index]`` reads one sample."""

    take: Callable[..., Columns]
    __len__: Callable[..., int]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample. Raises ``IndexError``: there is no such sample."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"an index must be from {-len(self)} to {len(self) - 1}, got {index}")
        found: dict[str, Tensor] = self.__getitems__([index % len(self)])[0]
        return found

    def __getitems__(self, indices: Sequence[int]) -> "Picked":
        """Return a batch of samples for torch's ``DataLoader``; see ``collate``."""
        return Picked(self.take(indices), len(indices))


class Picked(Sequence[dict[str, Tensor]]):
    """Sequence of the samples of a batch; a sample consists of views of the batch's tensors."""

    def __init__(self, fields: Mapping[str, Values], num_samples: int) -> None:
        self.fields = fields
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]
        if isinstance(number, range):
            return [self[one] for one in number]
        return {name: values[number] for name, values in self.fields.items()}


def collate(samples: Sequence[Any]) -> Any:
    """Return the tensors of a batch without copying them, for ``DataLoader(collate_fn=collate)``.

    Args:
        samples: batch from ``ShardedDataset.__getitems__``; all other samples are passed to
            ``default_collate``.
    """
    return samples.fields if isinstance(samples, Picked) else default_collate(list(samples))
