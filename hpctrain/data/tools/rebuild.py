"""A manifest made anew from what the shards say of themselves."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.core.atomic import crc32_of, reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import DataError
from hpctrain.core.units import format_numbers
from hpctrain.data.format.layout import FORMAT, Field, Manifest, Place, ShardEntry
from hpctrain.data.format.own import own_dataset
from hpctrain.data.format.part import raw_offset
from hpctrain.data.tools.salvage import UNREADABLE

_FINISHED = re.compile(r".+-[0-9a-f]{8}-\d+-of-(\d+)\.h5")

Attributes = Mapping[str, Any]


def rebuild(directory: Path) -> Manifest:
    """Make the manifest of the data set whose shards are in a directory. Writes nothing.

    It takes every file for what it should be, but the tables of checksums in the shards still
    tell whether the blocks are; inside a block, lengths of ragged samples are beyond proof.

    Raises:
        DataError: no data set has all its shards here, several have, or a shard is not as it
            says.
    """
    sets, unreadable = _find(directory)
    missing = {
        uuid: [index for index in range(_num_shards(found)) if index not in found]
        for uuid, found in sets.items()
    }
    complete = [uuid for uuid, absent in missing.items() if not absent]
    if len(complete) > 1:
        raise DataError(
            f"{directory} has all shards of {len(complete)} data sets, {', '.join(complete)}; "
            f"move the files of all but one away"
        )
    if not complete:
        stories = [
            f"data set {uuid} lacks the shards {format_numbers(absent)} of "
            f"{_num_shards(sets[uuid])}"
            for uuid, absent in missing.items()
        ]
        found = "; ".join([*stories, *unreadable]) or "there is no shard"
        raise DataError(
            f"a manifest needs all shards of a data set in {directory}: {found}; "
            f"take them from another copy, or its manifest by --from COPY"
        )
    return _manifest(directory, sets[complete[0]])


def _find(directory: Path) -> tuple[dict[str, dict[int, tuple[Path, Attributes]]], list[str]]:
    """Return the shards by uuid and number, and what is wrong with other files."""
    sets: dict[str, dict[int, tuple[Path, Attributes]]] = {}
    unreadable = []
    for path in sorted(directory.iterdir()):
        if not _FINISHED.fullmatch(path.name):
            continue
        try:
            with h5py.File(path, "r", locking=False) as file:
                attributes = dict(file.attrs)
            if attributes["format"] != FORMAT or not attributes["complete"]:
                raise ValueError("it was not finished")
            of_uuid = sets.setdefault(str(attributes["dataset_uuid"]), {})
            of_uuid[int(attributes["shard"])] = path, attributes
        except UNREADABLE as error:
            unreadable.append(f"{path.name} cannot be used: {reason_of(error)}")
    return sets, unreadable


def _num_shards(found: Mapping[int, tuple[Path, Attributes]]) -> int:
    match = _FINISHED.fullmatch(next(iter(found.values()))[0].name)
    assert match
    return int(match[1])


def _manifest(directory: Path, found: Mapping[int, tuple[Path, Attributes]]) -> Manifest:
    attributes = found[0][1]
    try:
        fields = {
            name: Field(
                shape=tuple(record["shape"]),
                dtype=record["dtype"],
                ragged=record["ragged"],
                compression=record["filter"],
            )
            for name, record in json.loads(attributes["fields"]).items()
        }
        return Manifest(
            uuid=str(attributes["dataset_uuid"]),
            split=str(attributes["split"]),
            block_size=int(attributes["block_size"]),
            fields=fields,
            shards=tuple(_shard(*found[index], fields) for index in sorted(found)),
        )
    except UNREADABLE as error:
        raise DataError(
            f"the shards in {directory} do not make a data set: {reason_of(error)}; "
            f"take the damaged ones from another copy"
        ) from error


def _shard(path: Path, attributes: Attributes, fields: Mapping[str, Field]) -> ShardEntry:
    num_samples, num_bytes = int(attributes["n"]), path.stat().st_size
    num_blocks = -(-num_samples // int(attributes["block_size"]))
    places = {}
    try:
        with h5py.File(path, "r", locking=False) as file:
            for name, field in fields.items():
                places[name] = _place(file, name, field, num_samples, num_blocks)
    except UNREADABLE as error:
        raise DataError(f"shard {path.name}: {reason_of(error)}") from error
    return ShardEntry(
        file=path.name,
        num_samples=num_samples,
        num_bytes=num_bytes,
        crc32=crc32_of(path),
        places=places,
    )


def _place(file: Any, name: str, field: Field, num_samples: int, num_blocks: int) -> Place:
    num_bytes = Path(file.filename).stat().st_size
    index_offset, index_crc32, num_rows = None, None, None
    if field.ragged:
        index = own_dataset(file, f"index/{name}")
        _expect(index, (num_samples + 1,), "<u8")
        offsets = index[:]
        if offsets[0] or np.any(np.diff(offsets.astype(np.int64)) < 0):
            raise DataError(f"the index of field {name} does not grow from 0")
        index_offset, num_rows = raw_offset(index, num_bytes), int(offsets[-1])
        index_crc32 = crc32(offsets.data)
    data, crcs = (own_dataset(file, f"{table}/{name}") for table in ("data", "crc"))
    _expect(data, (num_samples if num_rows is None else num_rows, *field.shape), field.dtype)
    _expect(crcs, (num_blocks,), "<u4")
    return Place(
        offset=raw_offset(data, num_bytes),
        crc_offset=raw_offset(crcs, num_bytes),
        crc32=crc32(crcs[:].data),
        index_offset=index_offset,
        index_crc32=index_crc32,
        num_rows=num_rows,
    )


def _expect(dataset: Any, shape: tuple[int, ...], dtype: str) -> None:
    found = getattr(dataset, "shape", None), getattr(dataset, "dtype", None)
    if found != (shape, np.dtype(dtype)):
        raise DataError(f"{dataset.name} has {found}, by the attributes {(shape, dtype)}")
