"""The types of numbers that ``--field NAME=WHAT:TYPE`` asks for, of a source of any kind."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from shlex import quote

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.packing.source import Array, Batch, Read, Sample, Source, Take

NUMBER_TYPE = re.compile("b1|[iu][1248]|f[248]")


def cast(values: Array, dtype: str, what: str) -> Array:
    """Convert numbers; of what they are, floats lose digits at most."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = values.astype(dtype)
    if found.dtype.kind == "f":
        wrong = np.isinf(found) & np.isfinite(values)
    else:
        wrong = found != values
        if found.dtype.kind in "iu" and values.dtype.kind == "f":
            # The largest whole number of 8 bytes is none of float64, which rounds it up.
            wrong |= values >= float(np.iinfo(found.dtype).max) + 1
    if wrong.any():
        raise DataError(
            f"{what} holds {values[wrong].flat[0]}, which {dtype} cannot hold; choose another "
            f"type: --field NAME=WHAT:TYPE"
        )
    return found


def split_types(fields: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split ``WHAT:TYPE`` of each field; return what it holds, and the types that are given."""
    names, types = dict(fields), {}
    for name, what in fields.items():
        origin, _, dtype = what.rpartition(":")
        if origin and NUMBER_TYPE.fullmatch(dtype):
            names[name], types[name] = origin, dtype
    return names, types


def converted(found: Source, types: Mapping[str, str]) -> Source:
    """Return a source whose numbers have the types that are given, by field."""
    if not types:
        return found
    fields = dict(found.fields)
    for name, dtype in types.items():
        fields[name] = replace(fields[name], dtype=np.dtype(dtype).str)
    was, now = (sum(one.sample_bytes for one in each.values()) for each in (found.fields, fields))
    return replace(
        found,
        fields=fields,
        runs=[(count, partial(_take_converted, take, types)) for count, take in found.runs],
        parts=[(count, partial(_read_converted, read, types)) for count, read in found.parts],
        sample_bytes=found.sample_bytes * now / max(was, 1),
    )


def _take_converted(
    take: Take, types: Mapping[str, str], indices: NDArray[np.int64]
) -> Batch | list[Sample]:
    taken = take(indices)
    if isinstance(taken, dict):
        return _converted_batch(taken, types)
    return [(where, _converted_sample(where, arrays, types)) for where, arrays in taken]


def _read_converted(read: Read, types: Mapping[str, str]) -> Iterator[Batch | Sample]:
    for each in read():
        if isinstance(each, dict):
            yield _converted_batch(each, types)
        else:
            where, arrays = each
            yield where, _converted_sample(where, arrays, types)


def _converted_batch(batch: Batch, types: Mapping[str, str]) -> Batch:
    done = dict(batch)
    for name, dtype in types.items():
        values, what = batch[name], f"field {name}"
        if isinstance(values, list):
            done[name] = [cast(each, dtype, what) for each in values]
        else:
            done[name] = cast(values, dtype, what)
    return done


def _converted_sample(
    where: str, arrays: Mapping[str, Array], types: Mapping[str, str]
) -> dict[str, Array]:
    done = {n: cast(arrays[n], dtype, f"field {n} of {where}") for n, dtype in types.items()}
    return {**arrays, **done}


_MAX_OPTIONS = 12


def note_of_doubles(found: Source, given: Mapping[str, str]) -> Iterator[str]:
    """Yield a note if fields hold float64, the default of numpy, unless they are ``given`` so."""
    doubles = [
        name
        for name, field in found.fields.items()
        if field.dtype == "<f8" and not given.get(name, "").endswith(":f8")
    ]
    if not doubles:
        return
    shown = doubles if len(found.fields) > _MAX_OPTIONS else found.fields
    what = {name: given.get(name) or found.origins.get(name, name) for name in shown}
    typed = {name: f"{each}{':f4' * (name in doubles)}" for name, each in what.items()}
    options = " ".join(f"--field {name}={quote(each)}" for name, each in typed.items())
    others = "" if len(shown) == len(found.fields) else ", and --field for each other field"
    yield (
        f"float64 is stored for {', '.join(doubles)}, but models in float32 refuse it; to store "
        f"float32: {options}{others}"
    )
