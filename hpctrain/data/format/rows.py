"""Samples on their way into a data set: checked against its fields, and cut."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import Field
from hpctrain.data.samples import Ragged


class RaggedRows(NamedTuple):
    """Samples of a ragged field."""

    values: NDArray[Any]
    """``(num_rows, *shape)``"""
    offsets: NDArray[np.int64]
    """``(num_samples + 1,)``: between which of ``values`` each sample lies."""


Rows = Mapping[str, "NDArray[Any] | RaggedRows"]

Samples = Mapping[str, ArrayLike | Ragged | RaggedRows | Sequence[ArrayLike]] | Rows
"""For each field an array ``(num_samples, *shape)``; for a ragged one a list of arrays
``(length, *shape)``, or a ``Ragged``."""


def checked_rows(fields: Mapping[str, Field], samples: Samples) -> Rows:
    """Return samples in the dtypes of their fields.

    Raises:
        DataError: they do not fit the fields, or are not as many in each.
    """
    if samples.keys() != fields.keys():
        raise DataError(f"samples have the fields {sorted(fields)}, got {sorted(samples)}")
    rows: dict[str, NDArray[Any] | RaggedRows] = {}
    for name, field in fields.items():
        of_field: Any = samples[name]
        if field.ragged:
            rows[name] = _ragged(name, field, of_field)
        else:
            rows[name] = _array(name, field, np.asarray(of_field), "num_samples")
    lengths = {name: _count(some) for name, some in rows.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"all fields have the same number of samples, got {lengths}")
    return rows


def count(rows: Rows) -> int:
    """Return the number of samples."""
    return _count(next(iter(rows.values())))


def cut(rows: Rows, start: int, stop: int) -> Rows:
    """Return the samples ``[start, stop)``, without a copy."""
    return {
        name: some._replace(offsets=some.offsets[start : stop + 1])
        if isinstance(some, RaggedRows)
        else some[start:stop]
        for name, some in rows.items()
    }


def _count(some: NDArray[Any] | RaggedRows) -> int:
    return len(some.offsets) - 1 if isinstance(some, RaggedRows) else len(some)


def _array(name: str, field: Field, array: NDArray[Any], counts: str) -> NDArray[Any]:
    if array.shape[1:] != field.shape or not array.ndim:
        raise DataError(f"field {name} has shape ({counts}, *{field.shape}), got {array.shape}")
    if array.size and not np.can_cast(array.dtype, field.dtype, "safe"):
        raise DataError(
            f"field {name} holds {field.dtype}, which cannot hold every {array.dtype}; "
            f"convert the array first"
        )
    return array.astype(field.dtype, copy=False)


def _ragged(name: str, field: Field, samples: Any) -> RaggedRows:
    if isinstance(samples, Ragged):
        samples = RaggedRows(
            samples.values.numpy(force=True), samples.offsets.numpy(force=True).astype(np.int64)
        )
    if isinstance(samples, RaggedRows):
        values, offsets = _array(name, field, samples.values, "num_rows"), samples.offsets
        ends = (0, *offsets, len(values))
        if not len(offsets) or np.any(np.diff(ends) < 0):
            raise DataError(
                f"offsets of field {name} grow from 0 to {len(values)}, its number of rows, "
                f"got {offsets}"
            )
        return RaggedRows(values, offsets)
    if not np.iterable(samples):
        raise DataError(
            f"field {name} is ragged: give a list of arrays (length, *{field.shape}), "
            f"got {type(samples).__name__}"
        )
    arrays = [_array(name, field, np.asarray(sample), "length") for sample in samples]
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    empty = np.empty((0, *field.shape), field.dtype)
    return RaggedRows(np.concatenate([empty, *arrays]), offsets)
