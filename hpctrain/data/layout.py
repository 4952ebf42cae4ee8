"""What a data set looks like on disk: names, and the manifest that describes all shards.

A data set is a directory of HDF5 shards and ``manifest.json``, which is written last: without it
there is no data set. A shard holds ``/data/<field>`` with shape ``(n, ...)``, ``/crc/<field>``
with the crc32 of each block of samples, and attributes that tell the same as the manifest.
"""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from hpctrain.errors import DataError
from hpctrain.files import publishing, reason_of

FORMAT = "hpctrain-h5"
VERSION = 1
MANIFEST = "manifest.json"
SHARD_FILE = re.compile(r"[\w.-]+-[0-9a-f]{8}-\d{5}(-of-\d{5})?\.h5(\.short)?(\.part)?")

_KINDS = "biuf"
_PLAIN_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One named array of a data set; every sample has the same shape."""

    shape: tuple[int, ...]
    """Shape of one sample, ``()`` for a number."""
    dtype: str
    """numpy's name with the byte order, little-endian: ``<f4``, ``|u1``."""

    def __post_init__(self) -> None:
        """Check the shape and the dtype."""
        if any(extent < 0 for extent in self.shape):
            raise DataError(f"a sample's shape has no negative extent, got {self.shape}")
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            raise DataError(f"{self.dtype!r} is not a dtype of numpy") from None
        if dtype.kind not in _KINDS or dtype.itemsize > 8 or self.dtype != _little(dtype).str:
            raise DataError(
                f"a field holds little-endian booleans, integers or floats of at most 8 bytes, "
                f"got dtype {self.dtype}; convert it first"
            )

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: str | np.dtype[Any]) -> Self:
        """Make a field from any numpy dtype; the byte order becomes little-endian."""
        return cls(shape=tuple(map(int, shape)), dtype=_little(np.dtype(dtype)).str)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a field lies in a shard."""

    offset: int | None
    """First byte of ``/data/<field>``, None where only HDF5 can read it."""
    crc_offset: int | None
    """First byte of ``/crc/<field>``, None where only HDF5 can read it."""
    crc32: int
    """Of the bytes of ``/crc/<field>``: tells a shard of another data set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One HDF5 file of a data set."""

    file: str
    num_samples: int
    num_bytes: int
    crc32: int
    places: Mapping[str, Place]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All that a reader must know before it opens a shard."""

    uuid: str
    split: str
    block_size: int
    """Samples per crc32, counted from the start of each shard."""
    fields: Mapping[str, Field]
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        """Check that names are plain and places lie inside their files."""
        check_names(self.split, self.fields)
        if self.block_size < 1:
            raise DataError(f"block_size must be positive, got {self.block_size}")
        for shard in self.shards:
            self._check_shard(shard)

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return sum(shard.num_samples for shard in self.shards)

    def num_blocks(self, shard: Shard) -> int:
        """Blocks of a shard; the last one may be short."""
        return -(-shard.num_samples // self.block_size)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read and check the manifest of a data set.

        Raises:
            DataError: there is none, it was changed or damaged, or it is of a later version.
        """
        path = directory / MANIFEST
        try:
            return cls._from_record(json.loads(path.read_text()))
        except FileNotFoundError:
            raise DataError(
                f"a data set is a directory with {MANIFEST}, there is none in {directory}; "
                f"write it with hpctrain.data.writer, or give the right directory"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read {path}: {reason_of(error)}; check the mount") from error
        except (DataError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = error if isinstance(error, (DataError, ValueError)) else repr(error)
            raise DataError(
                f"{path} must be the manifest of a data set, but: {why}; write the data set again"
            ) from None

    def write(self, directory: Path) -> None:
        """Publish the manifest: from here on the data set exists.

        Raises:
            OSError: the file system refuses; an older manifest is still there.
        """
        record = self._to_record()
        with publishing(directory / MANIFEST) as part:
            part.write_text(json.dumps({"crc32": _crc32(record), **record}, indent=1) + "\n")

    def fields_record(self) -> dict[str, Any]:
        """Return the fields as JSON has them, here and in the attributes of a shard."""
        return {
            name: {"shape": field.shape, "dtype": field.dtype, "ragged": False, "filter": None}
            for name, field in self.fields.items()
        }

    def _to_record(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "uuid": self.uuid,
            "split": self.split,
            "n": self.num_samples,
            "block_size": self.block_size,
            "fields": self.fields_record(),
            "shards": [_shard_record(shard) for shard in self.shards],
        }

    @classmethod
    def _from_record(cls, record: dict[str, Any]) -> Self:
        if record["format"] != FORMAT:
            raise DataError(f"its format is {record['format']!r}, not {FORMAT!r}")
        if record["version"] > VERSION:
            raise DataError(
                f"its version is {record['version']}, and this hpctrain reads up to {VERSION}; "
                f"update hpctrain"
            )
        # Whoever passes this was written by us: the types need no check.
        if record.pop("crc32", None) != _crc32(record):
            raise DataError("its crc32 is wrong, so it was changed or damaged")
        return cls(
            uuid=record["uuid"],
            split=record["split"],
            block_size=record["block_size"],
            fields={name: _field(value) for name, value in record["fields"].items()},
            shards=tuple(map(_shard, record["shards"])),
        )

    def _check_shard(self, shard: Shard) -> None:
        if not _PLAIN_NAME.fullmatch(shard.file):
            raise DataError(f"a shard is a plain file name, got {shard.file!r}")
        if shard.num_samples < 1:
            raise DataError(f"shard {shard.file} must have samples, got {shard.num_samples}")
        if shard.places.keys() != self.fields.keys():
            raise DataError(
                f"shard {shard.file} must have the fields {sorted(self.fields)}, "
                f"got {sorted(shard.places)}"
            )
        for name, place in shard.places.items():
            data_bytes = shard.num_samples * self.fields[name].sample_bytes
            crc_bytes = 4 * self.num_blocks(shard)
            for offset, size in ((place.offset, data_bytes), (place.crc_offset, crc_bytes)):
                if offset is not None and not 0 <= offset <= shard.num_bytes - size:
                    raise DataError(
                        f"field {name} needs {size} bytes from byte {offset}, "
                        f"but shard {shard.file} has {shard.num_bytes}"
                    )


def check_names(split: str, fields: Mapping[str, Field]) -> None:
    """Check the names that a user chooses.

    Raises:
        DataError: a name cannot be part of a file name or be an attribute of a batch.
    """
    if not _PLAIN_NAME.fullmatch(split):
        raise DataError(f"a split is a word such as train, got {split!r}")
    if not fields:
        raise DataError('a data set needs at least one field, such as {"x": ((8, 8), "f4")}')
    for name in fields:
        if not name.isidentifier():
            raise DataError(f"a field has the name of a Python variable, got {name!r}")


def shard_file(split: str, uuid: str, shard: int, num_shards: int | None = None) -> str:
    """Return the name of a shard, or with ``num_shards`` unknown of the part of one.

    The start of the uuid keeps the shards of a new data set apart from those it replaces.
    """
    of = "" if num_shards is None else f"-of-{num_shards:05d}"
    return f"{split}-{uuid[:8]}-{shard:05d}{of}.h5"


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def _crc32(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())


def _field(record: dict[str, Any]) -> Field:
    if record["ragged"] or record["filter"]:
        raise DataError("it has ragged or filtered fields, which need a later hpctrain; update")
    return Field(shape=tuple(record["shape"]), dtype=record["dtype"])


def _shard(record: dict[str, Any]) -> Shard:
    return Shard(
        file=record["file"],
        num_samples=record["n"],
        num_bytes=record["bytes"],
        crc32=record["crc32"],
        places={name: Place(**place) for name, place in record["fields"].items()},
    )


def _shard_record(shard: Shard) -> dict[str, Any]:
    return {
        "file": shard.file,
        "n": shard.num_samples,
        "bytes": shard.num_bytes,
        "crc32": shard.crc32,
        "fields": {name: asdict(place) for name, place in shard.places.items()},
    }
