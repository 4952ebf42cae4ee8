"""Description of a data set by its manifest, and of one sample."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.data.format.compression import load_filters
from hpctrain.data.format.layout import Manifest, ShardEntry, classes_of

_NUM_VALUES = 8
"""Shown of a sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldInfo:
    """One field of a data set."""

    name: str
    shape: tuple[int, ...]
    """Of a sample; of a ragged field, of each of its rows."""
    dtype: str
    ragged: bool
    compression: str | None
    num_bytes: int
    """Of all values, decoded."""
    mean_length: float | None
    """Rows of a sample of a ragged field, on average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """One file of a data set."""

    file: str
    num_samples: int
    num_bytes: int
    """Size that the file must have."""
    state: str
    """``here``, ``missing`` or ``other size``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Info:
    """What a data set holds."""

    directory: str
    uuid: str
    split: str
    num_samples: int
    num_bytes: int
    """Of all shards."""
    block_size: int
    created_by: str
    """Versions that wrote the first shard, empty where it cannot be read."""
    classes: tuple[str, ...]
    """Names of the labels 0, 1, ..., where ``classes.txt`` tells them."""
    fields: tuple[FieldInfo, ...]
    shards: tuple[ShardInfo, ...]


def info(directory: Path | str) -> Info:
    """Tell what a data set holds, without reading its data.

    Raises:
        DataError: there is no data set.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    return Info(
        directory=str(directory),
        uuid=manifest.uuid,
        split=manifest.split,
        num_samples=manifest.num_samples,
        num_bytes=manifest.num_bytes,
        block_size=manifest.block_size,
        created_by=_created_by(directory / manifest.shards[0].file) if manifest.shards else "",
        classes=classes_of(directory, manifest),
        fields=tuple(_field(manifest, name) for name in manifest.fields),
        shards=tuple(_shard(directory, shard) for shard in manifest.shards),
    )


def _field(manifest: Manifest, name: str) -> FieldInfo:
    field = manifest.fields[name]
    num_rows = manifest.num_samples
    if field.ragged:
        num_rows = sum(shard.places[name].num_rows or 0 for shard in manifest.shards)
    return FieldInfo(
        name=name,
        shape=field.shape,
        dtype=field.dtype,
        ragged=field.ragged,
        compression=field.compression,
        num_bytes=num_rows * field.sample_bytes,
        mean_length=num_rows / max(1, manifest.num_samples) if field.ragged else None,
    )


def _shard(directory: Path, shard: ShardEntry) -> ShardInfo:
    try:
        num_bytes = (directory / shard.file).stat().st_size
        state = "here" if num_bytes == shard.num_bytes else "other size"
    except OSError:
        state = "missing"
    return ShardInfo(
        file=shard.file, num_samples=shard.num_samples, num_bytes=shard.num_bytes, state=state
    )


def _created_by(path: Path) -> str:
    try:
        with h5py.File(path, "r", locking=False) as file:
            return str(file.attrs["created_by"])
    except (OSError, RuntimeError, KeyError):
        return ""


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
    from hpctrain.data.format.rows import RaggedRows  # noqa: PLC0415 - loads torch
    from hpctrain.data.tools.copying import stream  # noqa: PLC0415

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
