"""One sample of a data set, for people."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.data.format.compression import load_filters
from hpctrain.data.format.layout import Manifest
from hpctrain.data.format.rows import RaggedRows
from hpctrain.data.io.copying.copy import stream

_NUM_VALUES = 8
"""Shown of a sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One field of one sample."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: list[Any]
    """The first ones."""


def peek(directory: Path | str, index: int) -> tuple[Shown, ...]:
    """Read one sample and tell what it looks like.

    Raises:
        DataError: there is no such sample, or it cannot be read.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    if not 0 <= index < manifest.num_samples:
        raise DataError(f"samples are 0 to {manifest.num_samples - 1}, got {index}")
    load_filters(manifest.fields)
    _, rows = next(stream(directory, manifest, index, index + 1))
    found = []
    for name, some in rows.items():
        values = some[0]
        if isinstance(some, RaggedRows):
            values = some.values[some.offsets[0] : some.offsets[1]]
        first = np.ravel(values)[:_NUM_VALUES].tolist()
        shape, dtype = np.shape(values), manifest.fields[name].dtype
        found.append(Shown(name=name, shape=shape, dtype=dtype, values=first))
    return tuple(found)
