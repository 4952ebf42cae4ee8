"""Several sources of the same fields, one after another, as one source."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.packing.source import Batch, Indexed, Wanted


@dataclass(kw_only=True)
class Joined(Indexed):
    """Sources, the samples of the first one first."""

    parts: Sequence[Indexed]

    def __len__(self) -> int:
        """Return the number of samples of all."""
        return sum(map(len, self.parts))

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """Gather samples from their sources."""
        ends = np.cumsum([len(part) for part in self.parts])
        homes = np.searchsorted(ends, indices, side="right")
        order = np.argsort(homes, kind="stable")
        pieces = []
        for home in np.unique(homes):
            part = self.parts[home]
            inside = indices[homes == home] - (ends[home] - len(part))
            pieces.append(part.take(inside))
        back = np.argsort(order)
        batch: Batch = {}
        for name, one in self.fields.items():
            if one.ragged:
                rows = list(chain.from_iterable(piece[name] for piece in pieces))
                batch[name] = [rows[index] for index in back]
            else:
                batch[name] = np.concatenate([piece[name] for piece in pieces])[back]
        return batch


def open_joined(
    files: Sequence[Path], wanted: Wanted, open_one: Callable[[Path, Wanted], Indexed]
) -> Indexed:
    """Examine one file, or several of the same fields.

    Raises:
        DataError: their fields differ.
    """
    parts = [open_one(path, wanted) for path in files]
    first = parts[0]
    if len(parts) == 1:
        return first
    for path, part in zip(files, parts, strict=True):
        if part.fields != first.fields:
            raise DataError(
                f"files that are packed together have the same fields: {files[0]} has "
                f"{dict(first.fields)}, {path} has {dict(part.fields)}; pack them one by one"
            )
    return Joined(
        fields=first.fields,
        files=sorted({file for part in parts for file in part.files}),
        mean_lengths=first.mean_lengths,
        notes=tuple(dict.fromkeys(chain.from_iterable(part.notes for part in parts))),
        parts=parts,
    )
