"""The protocol of what a loader reads: a data set, a part of one, a mixture of several."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.layout import Field
from hpctrain.data.ragged import Values

Indices = NDArray[np.int64]
Columns = dict[str, Values]
"""Samples by field: a tensor whose first dimension counts them, or ``Ragged``."""


class Samples(Protocol):
    """Numbered samples that several threads may read at once."""

    @property
    def uuid(self) -> str:
        """Tells these samples in this order from all others."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """What a sample consists of."""

    @property
    def block_size(self) -> int:
        """Neighbouring samples that are read as one: a checksum or a chunk covers them."""

    @property
    def sample_bytes(self) -> float:
        """Mean bytes of a sample, over all fields."""

    @property
    def in_memory(self) -> bool:
        """Whether taking samples is a copy in memory, with no wait for a disk."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def take(self, indices: Indices) -> Columns:
        """Gather samples.

        Raises:
            CorruptError: some of them are damaged; it says which, in the numbers of this object.
        """

    def will_need(self, indices: Indices) -> None:
        """Start to bring samples into memory, and return at once."""


def file_of(samples: Samples, index: int) -> str | None:
    """Return the file that holds a sample; None for data that cannot tell."""
    tell = getattr(samples, "file_of", None)
    return None if tell is None else tell(index)
