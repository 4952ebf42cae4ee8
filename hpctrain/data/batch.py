"""Samples that come together: the share of one rank in a global batch, or those asked for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hpctrain.data.samples import Ragged, Values


@dataclass(frozen=True, slots=True)
class Batch:
    """The share of one rank in a global batch: ``x, y = batch``, ``batch.x`` or ``batch["x"]``."""

    fields: Mapping[str, Values]
    """Values by name, in the order of the data set or of what the transform returned."""
    num_samples: int
    """Samples of this rank; 0 where a short tail does not go round."""
    num_repeated: int = 0
    """How many of them, the last ones, came before in this epoch: ``tail="wrap"`` alone."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """Return the batch on a device; with pinned memory ``non_blocking`` does not wait."""
        moved = {
            name: values.to(device, non_blocking=non_blocking)
            for name, values in self.fields.items()
        }
        return replace(self, fields=moved)

    def __iter__(self) -> Iterator[Values]:
        """Yield the values."""
        return iter(self.fields.values())

    def __getitem__(self, name: str) -> Values:
        """Return the values of a field."""
        return self.fields[name]

    def __getattr__(self, name: str) -> Values:
        """Return the values of a field."""
        # While a batch is unpickled it has no fields yet, and this must not ask for them.
        if name != "fields" and name in self.fields:
            return self.fields[name]
        raise AttributeError(f"a batch has no field {name!r}")


class Picked(Sequence[dict[str, Tensor]]):
    """A batch whose items are its samples, as views."""

    def __init__(self, fields: Mapping[str, Values], num_samples: int) -> None:
        """Take a batch."""
        self.fields = fields
        self._num_samples = num_samples

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, index: Any) -> Any:
        """Return one sample, or a list of several."""
        number = range(len(self))[index]
        if isinstance(number, range):
            return [self[one] for one in number]
        return {name: values[number] for name, values in self.fields.items()}


def padded(fields: Mapping[str, Values]) -> dict[str, Values]:
    """Fill samples up to the longest one of the batch; ``<field>_lengths`` tells their lengths."""
    result: dict[str, Values] = {}
    for name, values in fields.items():
        if isinstance(values, Ragged):
            result[name] = values.padded()
            result[f"{name}_lengths"] = values.lengths
        else:
            result[name] = values
    return result


def pinned(fields: Mapping[str, Values]) -> dict[str, Values]:
    """Copy values to memory from which a GPU can copy by itself."""
    return {name: values.pin_memory() for name, values in fields.items()}
