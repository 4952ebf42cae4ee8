"""Samples that come one by one: which fields they have, and how they become batches."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import Field
from hpctrain.data.packing.source import BATCH_BYTES, BATCH_SAMPLES, Array, Batch, field_of

Sample = tuple[str, Mapping[str, Array]]
"""Where it comes from, for errors, and its arrays by field."""

T = TypeVar("T")

NUM_EXAMINED = 64
"""Samples from which the fields are learnt."""


def fields_of(
    samples: Sequence[Sample], ragged: Collection[str], where: str
) -> tuple[dict[str, Field], float]:
    """Learn the fields from the first samples.

    A field is ragged if it is named so, or if the first dimension of these samples differs.
    Returns the mean bytes of a sample too.

    Raises:
        DataError: there is no sample, or they differ in more than their length.
    """
    if not samples:
        raise DataError(f"a data set needs at least one sample, {where} has none")
    names = list(samples[0][1])
    if unknown := set(ragged) - set(names):
        raise DataError(
            f"--ragged names {', '.join(sorted(unknown))}, {where} has {', '.join(names)}"
        )
    fields, sample_bytes = {}, 0.0
    for name in names:
        arrays = [sample[1][name] for sample in samples]
        what = f"field {name} of {where}"
        shape = arrays[0].shape
        is_ragged = name in ragged or any(array.shape != shape for array in arrays)
        if is_ragged and not all(array.shape for array in arrays):
            raise DataError(f"{what}: a number has no length to be ragged")
        fields[name] = field_of(
            shape[1:] if is_ragged else shape, _common_dtype(arrays, what), what, ragged=is_ragged
        )
        mean_length = sum(map(len, arrays)) / len(arrays) if is_ragged else 1
        sample_bytes += fields[name].sample_bytes * mean_length
    for sample in samples:
        _check_sample(sample, fields)
    return fields, sample_bytes


def picked(
    where: str, parts: Mapping[str, T], names: Mapping[str, str], *, takes_all: bool
) -> dict[str, T]:
    """Return what each field gets of the parts of a sample; ``names`` are by field.

    Raises:
        DataError: it lacks one, or has others where ``takes_all``.
    """
    wrong = [f"lacks {name}" for name in names.values() if name not in parts]
    if takes_all:
        wrong += [f"has {name} besides" for name in sorted({*parts} - {*names.values()})]
    if wrong:
        raise DataError(
            f"all samples have the parts of the first: {', '.join(names.values())}; {where} "
            f"{' and '.join(wrong)}; complete it, or name those that all have: --field NAME=WHAT"
        )
    return {name: parts[at] for name, at in names.items()}


def batched(samples: Iterable[Sample], fields: Mapping[str, Field]) -> Iterator[Batch]:
    """Gather samples into batches of a few MiB.

    Raises:
        DataError: a sample has not the shapes of the fields; names the sample.
    """
    waiting: list[Sample] = []
    num_bytes = 0
    for sample in samples:
        waiting.append(sample)
        num_bytes += sum(array.nbytes for array in sample[1].values())
        if num_bytes >= BATCH_BYTES or len(waiting) == BATCH_SAMPLES:
            yield stacked(waiting, fields)
            waiting, num_bytes = [], 0
    if waiting:
        yield stacked(waiting, fields)


def stacked(samples: Sequence[Sample], fields: Mapping[str, Field]) -> Batch:
    """Make one batch of samples.

    Raises:
        DataError: a sample has not the shapes of the fields; names the sample.
    """
    for sample in samples:
        _check_sample(sample, fields)
    batch: Batch = {}
    for name, field in fields.items():
        arrays = [arrays[name] for _, arrays in samples]
        batch[name] = arrays if field.ragged else np.stack(arrays)
    return batch


def _common_dtype(arrays: Sequence[Array], what: str) -> np.dtype[Any]:
    dtype = np.result_type(*arrays)
    if dtype.kind == "f" and all(array.dtype.kind in "iu" for array in arrays):
        raise DataError(
            f"whole numbers stay whole, those of {what} are of 64 bits with and without a sign, "
            f"which have {dtype} in common alone; bring them to one type, or pack them as bytes"
        )
    return dtype


def _check_sample(sample: Sample, fields: Mapping[str, Field]) -> None:
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
