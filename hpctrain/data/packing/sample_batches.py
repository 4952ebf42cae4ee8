"""Samples that come one by one: which fields they have, and how they become batches."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB
from hpctrain.data.format.layout import Field
from hpctrain.data.packing.source import Array, Batch, field_of

Sample = tuple[str, Mapping[str, Array]]
"""Where it comes from, for errors, and its arrays by field."""

NUM_EXAMINED = 64
"""Samples from which the fields are learnt."""

_BATCH_BYTES = 8 * MIB
_BATCH_SAMPLES = 1024


def fields_of(
    samples: Sequence[Sample], ragged: Collection[str], where: str
) -> tuple[dict[str, Field], dict[str, float]]:
    """Learn the fields from the first samples.

    A field is ragged if it is named so, or if the first dimension of these samples differs.

    Returns:
        The fields, and the mean length of each ragged one.

    Raises:
        DataError: there is no sample, they differ in more than their length, or in their names.
    """
    if not samples:
        raise DataError(f"a data set needs at least one sample, {where} has none")
    names = list(samples[0][1])
    if unknown := set(ragged) - set(names):
        raise DataError(
            f"--ragged names {', '.join(sorted(unknown))}, {where} has {', '.join(names)}"
        )
    for name, arrays in samples:
        check_names(name, arrays, names)
    fields, mean_lengths = {}, {}
    for name in names:
        arrays_of = [arrays[name] for _, arrays in samples]
        dtype = np.result_type(*arrays_of)
        if dtype.kind == "f" and all(array.dtype.kind in "iu" for array in arrays_of):
            raise DataError(
                f"whole numbers stay whole, those of field {name} of {where} are of 64 bits with "
                f"and without a sign, which have {dtype} in common alone; bring them to one type, "
                f"or pack them as bytes"
            )
        shape = arrays_of[0].shape
        if name in ragged or any(array.shape != shape for array in arrays_of):
            if not shape:
                raise DataError(f"field {name} of {where}: a number has no length to be ragged")
            inner = field_of(shape[1:], dtype, f"field {name} of {where}")
            fields[name] = Field.of(inner.shape, inner.dtype, ragged=True)
            mean_lengths[name] = sum(map(len, arrays_of)) / len(arrays_of)
        else:
            fields[name] = field_of(shape, dtype, f"field {name} of {where}")
    for sample in samples:
        check_shapes(sample, fields)
    return fields, mean_lengths


def batched(samples: Iterable[Sample], fields: Mapping[str, Field]) -> Iterator[Batch]:
    """Gather samples into batches of a few MiB.

    Raises:
        DataError: a sample has not the names and shapes of the fields; names the sample.
    """
    waiting: list[Sample] = []
    num_bytes = 0
    for sample in samples:
        check_names(*sample, list(fields))
        check_shapes(sample, fields)
        waiting.append(sample)
        num_bytes += sum(array.nbytes for array in sample[1].values())
        if num_bytes >= _BATCH_BYTES or len(waiting) == _BATCH_SAMPLES:
            yield stacked(waiting, fields)
            waiting, num_bytes = [], 0
    if waiting:
        yield stacked(waiting, fields)


def stacked(samples: Sequence[Sample], fields: Mapping[str, Field]) -> Batch:
    """Make one batch of samples that were checked."""
    batch: Batch = {}
    for name, field in fields.items():
        arrays = [arrays[name] for _, arrays in samples]
        batch[name] = arrays if field.ragged else np.stack(arrays)
    return batch


def check_names(name: str, arrays: Mapping[str, Array], names: Sequence[str]) -> None:
    """Check that a sample has just these fields.

    Raises:
        DataError: it has not.
    """
    if set(arrays) != set(names):
        raise DataError(
            f"all samples have the same fields: {', '.join(names)}; {name} has "
            f"{', '.join(arrays) or 'none'}; name those that all have: --field NAME=WHAT"
        )


def check_shapes(sample: Sample, fields: Mapping[str, Field]) -> None:
    """Check that the arrays of a sample fit the fields.

    Raises:
        DataError: one does not.
    """
    where, arrays = sample
    for name, field in fields.items():
        shape = arrays[name].shape
        if field.ragged and (not shape or shape[1:] != field.shape):
            raise DataError(
                f"samples of the ragged field {name} have the shape (length, *{field.shape}), "
                f"{where} has {shape}; bring them to one shape but for the first dimension"
            )
        if not field.ragged and shape != field.shape:
            raise DataError(
                f"samples of field {name} have the shape {field.shape}, {where} has {shape}; "
                f"if their first dimension alone differs: --ragged {name}; images: --resize HxW "
                f"or --encoded"
            )
