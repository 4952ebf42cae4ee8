"""A manifest made anew from what the shards say of themselves."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.core.atomic import crc32_of, reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import Field, Manifest, Place, ShardEntry, fields_of
from hpctrain.data.format.own import own_dataset
from hpctrain.data.format.part import with_offsets
from hpctrain.data.tools.blocks import UNREADABLE

_FINISHED = re.compile(r".+-[0-9a-f]{8}-\d+-of-(\d+)\.h5")


def rebuild(directory: Path) -> Manifest:
    """Make the manifest of the data set whose shards are in a directory. Writes nothing.

    It takes every file for what it should be, but the tables of checksums in the shards still
    tell whether the blocks are; inside a block, lengths of ragged samples are beyond proof.

    Raises:
        DataError: it is not one data set that has all its shards here, or a shard is not as it
            says.
    """
    sets: dict[str, dict[int, Path]] = {}
    stories = []
    for path in sorted(path for path in directory.iterdir() if _FINISHED.fullmatch(path.name)):
        try:
            with h5py.File(path, "r", locking=False) as file:
                if not file.attrs["complete"]:
                    raise ValueError("it was not finished")
                of_uuid = sets.setdefault(str(file.attrs["dataset_uuid"]), {})
                of_uuid[int(file.attrs["shard"])] = path
        except UNREADABLE as error:
            stories.append(f"{path.name} cannot be used: {reason_of(error)}")
    complete = [found for found in sets.values() if len(found) == _num_shards(found)]
    if len(complete) != 1:
        counts = [f"{len(f)} of {_num_shards(f)} shards of {uuid}" for uuid, f in sets.items()]
        raise DataError(
            f"a manifest needs all shards of one data set, {directory} has "
            f"{'; '.join(counts + stories) or 'no shard'}; take the others, or the manifest, from "
            f"another copy by --from COPY, and move away what is of another data set"
        )
    paths = [path for _, path in sorted(complete[0].items())]
    try:
        with h5py.File(paths[0], "r", locking=False) as file:
            attributes = dict(file.attrs)
        fields, block_size = fields_of(json.loads(attributes["fields"])), attributes["block_size"]
        return Manifest(
            uuid=str(attributes["dataset_uuid"]),
            split=str(attributes["split"]),
            block_size=int(block_size),
            fields=fields,
            shards=tuple(_shard(path, fields) for path in paths),
        )
    except UNREADABLE as error:
        raise DataError(
            f"the shards in {directory} do not make a data set: {reason_of(error)}; "
            f"take the damaged ones from another copy"
        ) from error


def _num_shards(found: Mapping[int, Path]) -> int:
    match = _FINISHED.fullmatch(next(iter(found.values())).name)
    return int(match[1]) if match else 0


def _shard(path: Path, fields: Mapping[str, Field]) -> ShardEntry:
    with h5py.File(path, "r", locking=False) as file:
        num_samples = int(file.attrs["n"])
        places = {name: _place(file, name, field.ragged) for name, field in fields.items()}
    return ShardEntry(
        file=path.name,
        num_samples=num_samples,
        num_bytes=path.stat().st_size,
        crc32=crc32_of(path),
        places=with_offsets(path, places),
    )


def _place(file: Any, name: str, is_ragged: bool) -> Place:  # noqa: FBT001 - of the field
    table = np.ascontiguousarray(own_dataset(file, f"crc/{name}")[:])
    place = Place(offset=None, crc_offset=None, crc32=crc32(table.data))
    if not is_ragged:
        return place
    index = np.ascontiguousarray(own_dataset(file, f"index/{name}")[:])
    if index[0] or np.any(np.diff(index.astype(np.int64)) < 0):
        raise DataError(f"the index of field {name} does not grow from 0")
    return replace(place, index_crc32=crc32(index.data), num_rows=int(index[-1]))
