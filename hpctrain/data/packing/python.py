"""Python objects: whatever yields dicts of arrays, and data sets with a length and an index."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import DataError
from hpctrain.data.packing.named import file_of, resolve
from hpctrain.data.packing.sample_batches import (
    NUM_EXAMINED,
    Sample,
    batched,
    check_names,
    check_shapes,
    fields_of,
    stacked,
)
from hpctrain.data.packing.source import Array, Batch, Indexed, Streamed, WantedFields, chosen


@dataclass(kw_only=True)
class Items:
    """An object with samples, and which of their parts are packed."""

    name: str
    """``module:function``, or the type of the object."""
    made: Any = field(default=None, repr=False)
    """The object; None until a name is looked up."""
    is_named: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    """Field -> key, or position, in an item."""
    takes_all: bool = True
    """Whether these are all keys, so that an item with more of them is not as the others."""

    def get(self) -> Any:
        """Return the object; a function is called for it."""
        if self.made is None:
            self.made = resolve(self.name, "SOURCE")
        return self.made() if callable(self.made) and not _is_indexed(self.made) else self.made

    def sample(self, index: int, item: Any) -> Sample:
        """Turn an item into a sample.

        Raises:
            DataError: it is neither a dict nor a tuple, or has not what is wanted.
        """
        where = f"item {index} of {self.name}"
        parts = _parts(item, where)
        if not self.names:
            return where, parts
        if self.takes_all:
            check_names(where, parts, list(self.names.values()))
        chosen(list(parts), self.names, where)
        return where, {name: parts[at] for name, at in self.names.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the object that a name stands for: each process makes its own."""
        return {**self.__dict__, "made": None if self.is_named else self.made}


@dataclass(kw_only=True)
class PythonIndexed(Indexed):
    """An object with ``len()`` and ``[index]``, such as a data set of torch."""

    items: Items
    _made: Any = field(default=None, repr=False)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._object)

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """Get items."""
        samples = [self.items.sample(index, self._object[index]) for index in indices.tolist()]
        for sample in samples:
            check_names(*sample, list(self.fields))
            check_shapes(sample, self.fields)
        return stacked(samples, self.fields)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the object."""
        return {**self.__dict__, "_made": None}

    @property
    def _object(self) -> Any:
        if self._made is None:
            self._made = self.items.get()
        return self._made


@dataclass(kw_only=True)
class PythonStreamed(Streamed):
    """An object that yields items, in the same order each time."""

    items: Items

    @property
    def num_parts(self) -> int:
        """One: nobody knows where to cut it."""
        return 1

    def batches(self, part: int) -> Iterator[Batch]:
        """Go through the items."""
        assert part == 0
        return batched(samples_of(self.items), self.fields)


def samples_of(items: Items) -> Iterator[Sample]:
    """Go through the items of an object."""
    for index, item in enumerate(items.get()):
        yield items.sample(index, item)


def open_python(source: Any, wanted: WantedFields) -> PythonIndexed | PythonStreamed:
    """Examine an object, a function that makes it, or its name.

    Args:
        source: the object, or ``module:function``. An item is a dict of arrays, or a tuple, whose
            parts are named 0, 1, ...
        wanted: which parts of an item.

    Raises:
        DataError: there are no items, or they are not alike.
    """
    is_named = isinstance(source, str)
    items = Items(
        name=source if is_named else type(source).__name__,
        made=None if is_named else source,
        is_named=is_named,
    )
    made = items.get()
    _check_object(made, items.name)
    if iter(made) is made and not callable(items.made):
        raise DataError(
            f"a source is gone through more than once, an iterator such as {items.name} cannot "
            f"be; give the function that makes it"
        )
    where = items.name
    if _is_indexed(made):
        first = [made[index] for index in range(min(len(made), NUM_EXAMINED))]
    else:
        first = list(islice(made, NUM_EXAMINED))
    samples = [items.sample(index, item) for index, item in enumerate(first)]
    if samples:
        items.names = chosen(list(samples[0][1]), wanted.fields, where)
        items.takes_all = not wanted.fields
        samples = [items.sample(index, item) for index, item in enumerate(first)]
    fields, mean_lengths = fields_of(samples, wanted.ragged, where)
    kind = PythonIndexed if _is_indexed(made) else PythonStreamed
    return kind(
        items=items,
        fields=fields,
        mean_lengths=mean_lengths,
        code=file_of(items.name) if is_named else (),
    )


def _check_object(made: Any, name: str) -> None:
    is_indexed = _is_indexed(made)
    if isinstance(made, Mapping) and 0 not in made:
        is_indexed = False  # one sample, or whole arrays, rather than samples by number
    elif not is_indexed:
        is_indexed = hasattr(made, "__iter__") or hasattr(made, "__getitem__")
    if not is_indexed:
        raise DataError(
            f"a source yields samples, or has len() and [index], {name} gives one "
            f"{type(made).__name__}; yield a dict for each sample, or save whole arrays with "
            f"numpy.savez and pack that file"
        )


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
            f'a sample is a dict such as {{"x": array, "y": 3}}, or a tuple, '
            f"{where} is of type {type(item).__name__}"
        )
    return {name: _array(value, f"{name} of {where}") for name, value in parts.items()}


def _array(value: Any, what: str) -> Array:
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the parts of a sample are what numpy makes arrays of, {what} is not: "
            f"{reason_of(error)}; convert it first"
        ) from error
