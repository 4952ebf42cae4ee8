"""Samples that came out of a data set together, and look like a list of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from torch import Tensor

from hpctrain.data.ragged import Values


class Picked(Sequence[dict[str, Tensor]]):
    """A batch whose items are its samples, as views."""

    def __init__(self, fields: Mapping[str, Values], num_samples: int) -> None:
        """Take a batch."""
        self.fields = fields
        self._num_samples = num_samples

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    @overload
    def __getitem__(self, index: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> "list[dict[str, Tensor]]": ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return one sample, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        return {name: values[number] for name, values in self.fields.items()}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the samples."""
        return (self[number] for number in range(len(self)))
