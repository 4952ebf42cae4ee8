"""Sources that are Python objects: iterables of samples, and data sets with an index."""

from collections.abc import Iterator, Mapping
from itertools import islice, starmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core import target
from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import DataError
from hpctrain.core.target import make_importable
from hpctrain.data.packing.source import (
    NUM_EXAMINED,
    Array,
    PackSource,
    Sample,
    WantedFields,
    chosen,
    picked,
    raw,
)


def open_python(source: Any, wanted: WantedFields) -> PackSource:
    """Return the source for an object, or for a function (or its name) that returns an object.

    A name is ``module:function``. Each item of the object is a dict of arrays, or a tuple of
    arrays, which are named 0, 1, ...
    """
    is_named = isinstance(source, str)
    name = source if is_named else type(source).__name__
    given = resolve(name, "SOURCE") if is_named else source
    made = _called(given)
    _check_object(made, name)
    if iter(made) is made and not callable(given):
        raise DataError(
            f"a source must be iterable more than once, but {name} is an iterator; pass the "
            f"function that creates it"
        )
    is_indexed = _is_indexed(made)
    if is_indexed:
        first = [made[index] for index in range(min(len(made), NUM_EXAMINED))]
    else:
        first = list(islice(made, NUM_EXAMINED))
    parts = list(_parts(first[0], f"item 0 of {name}")) if first else []
    names = chosen(parts, wanted.fields, name)

    def sample(index: int, item: Any) -> Sample:
        where = f"item {index} of {name}"
        return where, picked(where, _parts(item, where), names, takes_all=not wanted.fields)

    def take(indices: NDArray[np.int64]) -> list[Sample]:
        return [sample(index, made[index]) for index in indices.tolist()]

    def read() -> Iterator[Sample]:
        return starmap(sample, enumerate(_called(given)))

    found = PackSource(
        runs=[(len(made), take)] if is_indexed else (),
        parts=() if is_indexed else [(None, read)],  # an iterable cannot be divided among ranks
        origins=names,
        code=tuple(map(str, target.file_of(name))) if is_named else (),
    )
    found.learn(starmap(sample, enumerate(first)), wanted.ragged, name)
    return found


def resolve(name: str, where: str) -> Any:
    """Return the object of a name ``module:function``; the current folder is searched first.

    Raises ``DataError``: there is no such module, or no such name in it.
    """
    make_importable(Path.cwd())
    return target.resolve(
        name, where, remedy="go to its folder, or install it", error_type=DataError
    )


def _check_object(made: Any, name: str) -> None:
    is_iterable = hasattr(made, "__iter__") or hasattr(made, "__getitem__")
    # A dict is one sample or a set of arrays, unless it has integer keys.
    if not is_iterable or (isinstance(made, Mapping) and 0 not in made):
        raise DataError(
            f"a source must yield samples, or have len() and [index], but {name} gives one "
            f"{type(made).__name__}; yield a dict for each sample, or pack a file of "
            f"numpy.savez"
        )


def _called(made: Any) -> Any:
    return made() if callable(made) and not _is_indexed(made) else made


def _is_indexed(made: Any) -> bool:
    is_class = isinstance(made, type)
    return hasattr(made, "__len__") and hasattr(made, "__getitem__") and not is_class


def _parts(item: Any, where: str) -> dict[str, Array]:
    if isinstance(item, Mapping):
        parts = {str(key): value for key, value in item.items()}
    elif isinstance(item, tuple | list):
        parts = {str(index): value for index, value in enumerate(item)}
    else:
        raise DataError(
            f'a sample must be a dict such as {{"x": array, "y": 3}}, or a tuple, but '
            f"{where} has the type {type(item).__name__}"
        )
    return {name: _array(value, f"{name} of {where}") for name, value in parts.items()}


def _array(value: Any, what: str) -> Array:
    if isinstance(value, str | bytes):
        return raw(value if isinstance(value, bytes) else value.encode())
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"numpy.asarray must accept {what}, but raised: {reason_of(error)}; convert it first"
        ) from error
