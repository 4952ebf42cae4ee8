"""Describe a data set from its manifest, and show one sample."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain import data
from hpctrain.core.errors import DataError
from hpctrain.data.format.dataset_manifest import Manifest, ShardEntry, classes_of

_NUM_VALUES = 8  # values shown per field of a sample


def info(directory: Path | str) -> dict[str, Any]:
    """Return a description of a data set as JSON values, without reading samples.

    ``created_by`` names the software versions that wrote the first shard, and is empty if this
    shard cannot be read. ``state`` of a shard is ``here``, ``missing`` or ``other size``.
    ``num_bytes`` of a field is the size of its decoded values. ``mean_length`` is None for fields
    that are not ragged. Raises ``DataError``: there is no data set.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    return {
        "directory": str(directory),
        "uuid": manifest.uuid,
        "split": manifest.split,
        "num_samples": manifest.num_samples,
        "num_bytes": manifest.num_bytes,
        "block_size": manifest.block_size,
        "created_by": _created_by(directory / manifest.shards[0].file),
        "classes": classes_of(directory, manifest),
        "fields": [_field(manifest, name) for name in manifest.fields],
        "shards": [
            {
                "file": shard.file,
                "num_samples": shard.num_samples,
                "num_bytes": shard.num_bytes,
                "state": _state(directory, shard),
            }
            for shard in manifest.shards
        ],
    }


def peek(directory: Path | str, index: int) -> list[dict[str, Any]]:
    """Read one sample and return the name, shape, dtype and first values of each field."""
    dataset = data.ShardedDataset(directory, io="read")  # the import loads torch
    if not 0 <= index < len(dataset):
        raise DataError(f"the index of a sample must be from 0 to {len(dataset) - 1}, got {index}")
    found = []
    for name, values in dataset[index].items():
        first = np.ravel(values)[:_NUM_VALUES].tolist()
        about = {"name": name, "shape": tuple(values.shape), "dtype": dataset.fields[name].dtype}
        found.append({**about, "values": first})
    return found


def _field(manifest: Manifest, name: str) -> dict[str, Any]:
    field, num_rows = manifest.fields[name], manifest.num_rows(name)
    return {
        "name": name,
        "shape": field.shape,
        "dtype": field.dtype,
        "ragged": field.ragged,
        "compression": field.compression,
        "num_bytes": num_rows * field.sample_bytes,
        "mean_length": num_rows / manifest.num_samples if field.ragged else None,
    }


def _state(directory: Path, shard: ShardEntry) -> str:
    try:
        num_bytes = (directory / shard.file).stat().st_size
    except OSError:
        return "missing"
    return "here" if num_bytes == shard.num_bytes else "other size"


def _created_by(path: Path) -> str:
    try:
        with h5py.File(path, "r", locking=False) as file:
            return str(file.attrs["created_by"])
    except (OSError, RuntimeError, KeyError):
        return ""
