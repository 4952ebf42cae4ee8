"""Description of a source of samples to pack, from which each rank reads its share."""

import dataclasses
import importlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB, format_bytes
from hpctrain.data.format.dataset_manifest import Field
from hpctrain.data.order.order import global_order

Array = NDArray[Any]
Batch = dict[str, Array | list[Array]]
"""Samples by field: an array ``(num_samples, *shape)``, or a list of samples if ragged."""

BATCH_BYTES, BATCH_SAMPLES = 8 * MIB, 1024
"""Limits of a batch in bytes and in samples; the limit that is reached first ends the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedFields:
    """Options that choose fields of a source and their form."""

    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name of the array in the source for each field; empty for all arrays of the source."""
    ragged: tuple[str, ...] = ()
    """Fields that are ragged even if the first samples have equal lengths."""
    resize: tuple[int, int] | None = None
    """Height and width of every image; proportions are not kept."""
    encoded: bool = False
    """Keep images as the bytes of their files, as a ragged field, and decode when training."""
    length: int | None = None
    """Cut texts into samples of this number of bytes or tokens, rather than at the end of each
    line; the rest of a file is omitted."""
    tokenizer: str | None = None
    """``module:function`` that converts a str to integers; None packs the bytes of the text."""


NUMBER_TYPE = re.compile("b1|[iu][1248]|f[248]")

Sample = tuple[str, Mapping[str, Array]]
"""Origin of a sample, as a text for errors, and the arrays of the sample by field."""

Take = Callable[[NDArray[np.int64]], Batch | list[Sample]]
"""Function that returns samples at ascending indices."""

Read = Callable[[], Iterator[Batch | Sample]]
"""Function that returns all samples in sequence, in batches or one by one."""

NUM_EXAMINED = 64  # number of samples from which the fields are determined


@dataclass(kw_only=True)
class PackSource:
    """Description of a source: its fields, files and readers of samples in a fixed order.

    Can be pickled. Rank 0 examines a source and sends the description to the other ranks, which
    open the files by their paths.
    """

    fields: Mapping[str, Field] = dataclasses.field(default_factory=dict)
    runs: Sequence[tuple[int, Take]] = ()
    """For random access: number of samples of each run, and the function that reads the run."""
    parts: Sequence[tuple[int | None, Read]] = ()
    """For sequential access: number of samples of each part, None if unknown, and its reader."""
    files: Sequence[str] = ()
    """Paths of all files that are read, in order; text needs less memory than ``Path``."""
    code: tuple[str, ...] = ()
    """Files with functions of the user; if they change, an interrupted packing cannot resume."""
    sample_bytes: float = 0  # approximate size of a sample in bytes, all fields together
    classes: tuple[str, ...] = ()  # names of the labels 0, 1, ..., if the source has names
    notes: tuple[str, ...] = ()  # notes for the user, one sentence each
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For each renamed field, the name of its data in the source."""
    types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For each field whose numbers are converted, the new dtype."""

    @property
    def is_indexed(self) -> bool:
        """Whether samples can be read in any order."""
        return bool(self.runs)

    @property
    def num_samples(self) -> int:
        """Number of samples, if samples can be read in any order."""
        return sum(count for count, _ in self.runs)

    def learn(self, samples: Iterable[Sample], ragged: Collection[str], where: str) -> None:
        """Determine the fields and the mean bytes of a sample from the first samples.

        A field is ragged if ``ragged`` names it, or if the first dimension of these samples
        differs. Raises ``DataError``: there are no samples, or other dimensions differ.
        """
        some = list(islice(samples, NUM_EXAMINED))
        if not some:
            raise DataError(f"a data set must have at least one sample, but {where} has none")
        names = list(some[0][1])
        if unknown := set(ragged) - set(names):
            raise DataError(
                f"--ragged must name fields of the source, but {where} has {', '.join(names)} "
                f"and not {', '.join(sorted(unknown))}"
            )
        learnt = {}
        for name in names:
            arrays = [sample[name] for _, sample in some]
            learnt[name] = _learnt(arrays, f"field {name} of {where}", ragged=name in ragged)
        self.fields = {name: field for name, (field, _) in learnt.items()}
        self.sample_bytes = sum(num_bytes for _, num_bytes in learnt.values())
        for sample in some:
            _check_sample(sample, self.fields)

    def with_types(self, types: Mapping[str, str]) -> "PackSource":
        """Return the source with the numbers of some fields converted to the given types."""
        fields = dict(self.fields)
        for name, dtype in types.items():
            fields[name] = replace(fields[name], dtype=np.dtype(dtype).str)
        was, now = (sum(f.sample_bytes for f in each.values()) for each in (self.fields, fields))
        sample_bytes = self.sample_bytes * now / max(was, 1)
        return replace(self, fields=fields, types=types, sample_bytes=sample_bytes)

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """Read samples by random access; ``indices`` are ascending."""
        ends = np.cumsum([count for count, _ in self.runs])
        homes = np.searchsorted(ends, indices, side="right")
        pieces = []
        for home in np.unique(homes):
            count, take = self.runs[home]
            found = take(indices[homes == home] - (ends[home] - count))
            pieces.append(self._typed(found) if isinstance(found, dict) else self._stacked(found))
        return self.joined_batches(pieces)

    def batched(self, samples: Iterable[Batch | Sample]) -> Iterator[Batch]:
        """Group single samples into batches of a few MiB; batches in the input are not divided.

        Raises ``DataError``: a sample does not have the shapes of the fields.
        """
        waiting: list[Sample] = []
        num_bytes = 0
        for sample in samples:
            if isinstance(sample, dict):
                yield self._typed(sample)
                continue
            waiting.append(sample)
            num_bytes += sum(array.nbytes for array in sample[1].values())
            if num_bytes >= BATCH_BYTES or len(waiting) == BATCH_SAMPLES:
                yield self._stacked(waiting)
                waiting, num_bytes = [], 0
        if waiting:
            yield self._stacked(waiting)

    def joined_batches(self, batches: Sequence[Batch]) -> Batch:
        """Concatenate batches field by field; samples of ragged fields stay in lists."""
        if len(batches) == 1:
            return batches[0]
        return {
            name: list(chain.from_iterable(batch[name] for batch in batches))
            if field.ragged
            else np.concatenate([batch[name] for batch in batches])
            for name, field in self.fields.items()
        }

    def _stacked(self, samples: Sequence[Sample]) -> Batch:
        typed = []
        for where, arrays in samples:
            _check_sample((where, arrays), self.fields)
            typed.append(self._typed(arrays, f" of {where}") if self.types else arrays)
        columns = {name: [arrays[name] for arrays in typed] for name in self.fields}
        return {
            name: columns[name] if field.ragged else np.stack(columns[name])
            for name, field in self.fields.items()
        }

    def _typed(self, columns: Mapping[str, Any], where: str = "") -> dict[str, Any]:
        done = dict(columns)
        for name, dtype in self.types.items():
            values, what = columns[name], f"field {name}{where}"
            if isinstance(values, list):
                done[name] = [cast(each, dtype, what) for each in values]
            else:
                done[name] = cast(values, dtype, what)
        return done

    def share_length(self, rank: int, size: int) -> int | None:
        """Return the number of samples that ``rank`` of ``size`` packs, None if unknown."""
        if self.is_indexed:
            return len(self._positions_of(rank, size))
        lengths = [length for length, _ in self._parts_of(rank, size)]
        known = [length for length in lengths if length is not None]
        return sum(known) if len(known) == len(lengths) else None

    def share(
        self, rank: int, size: int, *, skip: int = 0, seed: int | None = None
    ) -> Iterator[Batch]:
        """Yield batches of the contiguous samples that ``rank`` of ``size`` packs.

        The first ``skip`` samples are omitted. With random access, ``seed`` shuffles all samples;
        None keeps the order of the source. With sequential access, each rank gets consecutive
        ``parts``; if there are fewer parts than ranks, some ranks get none.
        """
        if self.is_indexed:
            yield from self._taken(self._positions_of(rank, size)[skip:], seed)
            return
        for length, read in self._parts_of(rank, size):
            if length is not None and length <= skip:
                skip -= length
                continue
            for batch in self.batched(read()):
                num_samples = len(next(iter(batch.values())))
                if skip < num_samples:
                    yield {name: rows[skip:] for name, rows in batch.items()}
                skip = max(skip - num_samples, 0)

    def _taken(self, mine: range, seed: int | None) -> Iterator[Batch]:
        step = int(min(max(BATCH_BYTES / max(self.sample_bytes, 1), 1), BATCH_SAMPLES))
        order = None if seed is None else global_order(self.num_samples, seed, 0)
        for start in range(0, len(mine), step):
            positions = np.array(mine[start : start + step], np.int64)
            if order is None:
                yield self.take(positions)
                continue
            # Read sequentially, then reorder the samples.
            indices = order.samples_at(positions)
            rising = np.argsort(indices)
            back = np.argsort(rising)
            batch = self.take(indices[rising])
            yield _rows_of(batch, back)

    def _positions_of(self, rank: int, size: int) -> range:
        return range(self.num_samples * rank // size, self.num_samples * (rank + 1) // size)

    def _parts_of(self, rank: int, size: int) -> Sequence[tuple[int | None, Read]]:
        count = len(self.parts)
        if count == 1:
            return self.parts if rank == 0 else ()  # rank 0, because it shows the progress bar
        return self.parts[count * rank // size : count * (rank + 1) // size]


def joined(sources: Sequence[PackSource]) -> PackSource:
    """Return one source with the samples of several sources, which must have equal fields."""
    first = sources[0]
    for one in sources:
        if one.fields != first.fields:
            raise DataError(
                f"files of a source must have the same fields, but {first.files[0]} has "
                f"{dict(first.fields)} and {one.files[0]} has {dict(one.fields)}; pack each file "
                f"separately"
            )
    return replace(
        first,
        runs=[run for one in sources for run in one.runs],
        files=sorted({file for one in sources for file in one.files}),
        notes=tuple(dict.fromkeys(chain.from_iterable(one.notes for one in sources))),
    )


class LoadedSamples:
    """Function that gives random access to a sequential source, by reading it into memory.

    Each process reads all samples at its first call. This call raises ``DataError`` if the samples
    need more than ``max_bytes``.
    """

    def __init__(self, found: PackSource, max_bytes: int) -> None:
        self._found, self._max_bytes = found, max_bytes

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __call__(self, indices: NDArray[np.int64]) -> Batch:
        """Return the samples at ``indices``."""
        return _rows_of(self._columns, indices)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_columns"}

    @cached_property
    def _columns(self) -> Batch:
        batches, num_bytes = [], 0
        samples = chain.from_iterable(read() for _, read in self._found.parts)
        for batch in self._found.batched(samples):
            num_bytes += sum(
                sum(each.nbytes for each in column) if isinstance(column, list) else column.nbytes
                for column in batch.values()
            )
            if num_bytes > self._max_bytes:
                raise DataError(
                    f"with --shuffle, samples that can only be read in order must fit into "
                    f"{format_bytes(self._max_bytes)} on every rank, but need more; leave out "
                    f"--shuffle, because the loader shuffles, or pack on fewer ranks"
                )
            batches.append(batch)
        return self._found.joined_batches(batches)


def _rows_of(batch: Batch, indices: NDArray[np.int64]) -> Batch:
    return {
        name: [column[i] for i in indices] if isinstance(column, list) else column[indices]
        for name, column in batch.items()
    }


def cast(values: Array, dtype: str, what: str) -> Array:
    """Convert numbers to ``dtype``; only floats may lose precision.

    Raises ``DataError``: ``dtype`` cannot represent a number; ``what`` names the array.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        found = values.astype(dtype)
    if found.dtype.kind == "f":
        wrong = np.isinf(found) & np.isfinite(values)
    else:
        wrong = found != values
        if found.dtype.kind in "iu" and values.dtype.kind == "f":
            # Compare with max + 1, because float64 rounds the largest 8-byte integer up to this.
            wrong |= values >= float(np.iinfo(found.dtype).max) + 1
    if wrong.any():
        raise DataError(
            f"the type of a field must represent all its values, but {dtype} cannot represent "
            f"{values[wrong].flat[0]} in {what}; choose another type: --field NAME=WHAT:TYPE"
        )
    return found


@contextmanager
def readable(what: str, kind: str, *errors: type[BaseException]) -> Iterator[None]:
    """Raise a library's error for a damaged file as a DataError that names the file."""
    try:
        yield
    except errors as error:
        raise DataError(
            f"{what} cannot be read as {kind}: {reason_of(error) or type(error).__name__}; "
            f"write or download it again, or remove it from the source"
        ) from None


def needed(module: str, what: str) -> ModuleType:
    """Import a module of the extra ``hpctrain[pack]``; ``what`` names the source in the error."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = (error.name or module).partition(".")[0]
        raise DataError(
            f"{what} must be read with the package {package}, but it is not installed; pip "
            f'install "hpctrain[pack]"'
        ) from None


def chosen(available: Sequence[str], wanted: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the name of the array for each field: ``wanted`` if given, otherwise all arrays.

    Raises ``DataError``: an array is not ``available``, or two arrays have the same field name.
    """
    for name in wanted.values():
        if name not in available:
            raise DataError(
                f"--field must be NAME=ARRAY or NAME=ARRAY:TYPE with an array of {where} "
                f"({', '.join(available) or 'none'}) and a type such as f4, f8 or i8, got {name!r}"
            )
    if wanted:
        return dict(wanted)
    found: dict[str, str] = {}
    for name in available:
        plain = re.sub(r"\W+", "_", name).strip("_")
        plain = plain if plain.isidentifier() else f"field_{plain}".rstrip("_")
        if plain in found:
            raise DataError(
                f"fields must have different names, but {found[plain]!r} and {name!r} of {where} "
                f"would both be {plain}; rename one: --field NAME={name}"
            )
        found[plain] = name
    return found


def field_of(shape: Sequence[int], dtype: Any, what: str, *, ragged: bool = False) -> Field:
    """Return the ``Field`` for samples of this shape and dtype; ``what`` names them in errors."""
    try:
        return Field.of(tuple(shape), dtype, ragged=ragged)
    except DataError as error:
        raise DataError(f"{what}: {error}, or choose other fields: --field NAME=WHAT") from None


def raw(data: bytes) -> Array:
    """Return bytes as an array ``(num_bytes,)`` uint8."""
    return np.frombuffer(data, np.uint8)


T = TypeVar("T")


def _learnt(arrays: Sequence[Array], what: str, *, ragged: bool) -> tuple[Field, float]:
    """Return the field that fits the given samples, and the mean bytes of a sample."""
    shape = arrays[0].shape
    is_ragged = ragged or any(array.shape != shape for array in arrays)
    if is_ragged and not all(array.shape for array in arrays):
        raise DataError(
            f"samples of a ragged field must have a first dimension, but {what} is a number in "
            f"some samples; leave the field out of --ragged, or make all samples arrays"
        )
    dtype = _common_dtype(arrays, what)
    field = field_of(shape[1:] if is_ragged else shape, dtype, what, ragged=is_ragged)
    return field, field.sample_bytes * (sum(map(len, arrays)) / len(arrays) if is_ragged else 1)


def picked(
    where: str, parts: Mapping[str, T], names: Mapping[str, str], *, takes_all: bool
) -> dict[str, T]:
    """Return the value of each field of a sample.

    ``parts`` maps array names to arrays of the sample, ``names`` maps fields to array names.
    Raises ``DataError``: an array is missing or, with ``takes_all``, has no field.
    """
    wrong = [f"lacks {name}" for name in names.values() if name not in parts]
    if takes_all:
        wrong += [f"also has {name}" for name in sorted({*parts} - {*names.values()})]
    if wrong:
        raise DataError(
            f"all samples must have the arrays of the first sample, {', '.join(names.values())}, "
            f"but {where} {' and '.join(wrong)}; complete it, or name the arrays that all samples "
            f"have: --field NAME=WHAT"
        )
    return {name: parts[at] for name, at in names.items()}


def _common_dtype(arrays: Sequence[Array], what: str) -> np.dtype[Any]:
    dtype = np.result_type(*arrays)
    if dtype.kind == "f" and all(array.dtype.kind in "iu" for array in arrays):
        raise DataError(
            f"integers of a field must have a common integer type, but {what} has signed and "
            f"unsigned integers of 64 bits, whose only common type is {dtype}; convert them to "
            f"one type, or pack bytes"
        )
    return dtype


def _check_sample(sample: Sample, fields: Mapping[str, Field]) -> None:
    where, arrays = sample
    for name, field in fields.items():
        shape = arrays[name].shape
        if field.ragged and (not shape or shape[1:] != field.shape):
            raise DataError(
                f"samples of the ragged field {name} must have the shape (length, "
                f"*{field.shape}), but {where} has {shape}; let only the first dimension differ"
            )
        if not field.ragged and shape != field.shape:
            raise DataError(
                f"samples of field {name} must have the shape {field.shape}, but {where} has "
                f"{shape}; use --ragged {name} if only their first dimension differs, and "
                f"--resize HxW or --encoded for images"
            )
