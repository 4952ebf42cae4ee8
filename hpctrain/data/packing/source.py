"""The protocols of sources: read at any place, or read through."""

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import Field

Array = NDArray[Any]
Batch = dict[str, Array | list[Array]]
"""Some samples: for each field ``(num_samples, *shape)``, of a ragged one a list of samples."""

Per = Literal["line", "paragraph", "file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedFields:
    """What of a source is packed, and in what form."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """Name of a field -> what of the source it holds; empty for all, by the source's names."""
    ragged: tuple[str, ...] = ()
    """Fields whose samples differ in length, where the first samples do not show it."""
    resize: tuple[int, int] | None = None
    """Height and width that every image is brought to; its proportions are not kept."""
    encoded: bool = False
    """Keep images as the bytes of their files, as a ragged field, and decode when training."""
    per: Per = "line"
    """What of a text is one sample; empty ones are left out."""
    length: int | None = None
    """Cut texts into samples of so many bytes or tokens; the rest of a file is left out."""
    tokenizer: str | None = None
    """``module:function`` from a str to whole numbers; None packs the bytes of the text."""


@dataclass(kw_only=True)
class Source(ABC):
    """Samples of some fields, in an order that is the same each time.

    Cheap to pickle: one rank examines a source, and the others get the result. Whatever is open
    is found again by its path.
    """

    fields: Mapping[str, Field]
    files: Sequence[Path] = ()
    """All that is read, in order."""
    code: tuple[Path, ...] = ()
    """Files with the user's own functions: after a change of them, the samples may be others."""
    mean_lengths: Mapping[str, float] = field(default_factory=dict)
    """Of ragged fields: about how long a sample is."""
    classes: tuple[str, ...] = ()
    """Names of the labels 0, 1, ..., where the source has names."""
    notes: tuple[str, ...] = ()
    """What a person should know, one sentence each."""

    @property
    def sample_bytes(self) -> float:
        """Mean bytes of a sample, over all fields."""
        return sum(
            prod(one.shape) * np.dtype(one.dtype).itemsize * self.mean_lengths.get(name, 1)
            for name, one in self.fields.items()
        )


class Indexed(Source):
    """A source whose samples can be read in any order."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def take(self, indices: NDArray[np.int64]) -> Batch:
        """Read samples, in the order of ``indices``."""


class Streamed(Source):
    """A source that is read from front to end, in parts that do not need each other."""

    @property
    @abstractmethod
    def num_parts(self) -> int:
        """Parts, such as files: what can be dealt out to ranks."""

    @abstractmethod
    def batches(self, part: int) -> Iterator[Batch]:
        """Read a part, some samples at a time."""

    def length_of(self, part: int) -> int | None:  # noqa: ARG002 - for those that know it
        """Return the number of samples of a part, None where it is not known beforehand."""
        return None


def needed(module: str, what: str) -> ModuleType:
    """Import a module that packing alone needs.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(
            f"{what} needs the package {module.partition('.')[0]}, which is not installed; "
            f'pip install "hpctrain[pack]"'
        ) from None


def chosen(available: Sequence[str], wanted: Mapping[str, str], where: str) -> dict[str, str]:
    """Return what each field holds: what is wanted, or all there is, by its own name.

    Args:
        available: names of the source.
        wanted: field -> name of the source.
        where: the source, for errors.

    Raises:
        DataError: a name does not exist, or two of them would become the same field.
    """
    for name in wanted.values():
        if name not in available:
            raise DataError(f"{where} has {', '.join(available) or 'nothing'}, but no {name!r}")
    if wanted:
        return dict(wanted)
    found: dict[str, str] = {}
    for name in available:
        plain = identifier(name)
        if plain in found:
            raise DataError(
                f"{found[plain]!r} and {name!r} of {where} would both be the field {plain}; "
                f"name them: --field NAME={name}"
            )
        found[plain] = name
    return found


def identifier(name: str) -> str:
    """Return the name of a field for any text."""
    plain = re.sub(r"\W+", "_", name).strip("_")
    return plain if plain.isidentifier() else f"field_{plain}".rstrip("_")


def field_of(shape: Sequence[int], dtype: Any, what: str) -> Field:
    """Make the field of an array of the source.

    Raises:
        DataError: a data set cannot hold this dtype.
    """
    try:
        return Field.of(tuple(shape), dtype)
    except DataError as error:
        raise DataError(f"{what}: {error}, or choose others: --field NAME=WHAT") from None
