"""Layout of a data set on disk: file names, and the manifest that describes all shards.

A data set is a directory of HDF5 shards and ``manifest.json``. The manifest is written last; a
directory without a manifest is not a data set. A shard of ``n`` samples holds ``/data/<field>``
with shape ``(n, ...)``, ``/crc/<field>`` with the crc32 of each block of samples, and attributes
that repeat the manifest.

Samples of a ragged field are stored one by one in ``/data/<field>``, with shape ``(rows, ...)``;
``/index/<field>``, uint64 of shape ``(n + 1,)``, holds the index of the first row of each sample
and, as its last element, the number of rows.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.atomic import PART, publishing, reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import DataError
from hpctrain.core.formats import fault_of, stamp
from hpctrain.core.python_compat import Self

FORMAT = "hpctrain-h5"
VERSION, READER = 1, "1.0"  # version of the format, and the oldest hpctrain that reads it
MANIFEST = "manifest.json"
"""Name of the file that describes a data set; it is written last."""
LOCK = "writer.lock"  # lock file of the writer that uses the directory
CLASSES = "classes.txt"  # line ``i`` has the name of label ``i``, from 0
COMPRESSIONS = (None, "zstd")
PLAIN_NAME = re.compile(r"\w[\w.-]*")
SHARD_FILE = re.compile(
    r"[\w.-]+-[0-9a-f]{8}-(r\d{5,}-)?\d{5,}(-of-\d{5,})?\.h5(\.short)?(\.part)?"
)
_JOURNAL = re.compile(r"[\w.-]+-r\d{5,}\.journal(\.part)?")

_KINDS = "biuf"
_MOST = 2**62
_DAMAGE = (DataError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """Shape, dtype and storage of one field, a named array of a data set."""

    shape: tuple[int, ...]
    """Shape of one sample, ``()`` for a number. In a ragged field, the shape of one row."""
    dtype: str  # numpy's name with the byte order, little-endian: ``<f4``, ``|u1``
    ragged: bool = False  # a sample is ``(length, *shape)``, and the lengths differ
    compression: str | None = None
    """None or ``zstd``, which saves disk space but multiplies the CPU time of reading."""

    def __post_init__(self) -> None:
        if any(extent < 0 for extent in self.shape):
            raise DataError(
                f"the shape of a sample must not have negative sizes, got {self.shape}"
            )
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            raise DataError(
                f"the type of a field must be a dtype of numpy, got {self.dtype!r}"
            ) from None
        little = dtype.newbyteorder("<").str
        if dtype.kind not in _KINDS or dtype.itemsize > 8 or self.dtype != little:
            raise DataError(
                f"a field must hold little-endian booleans, integers or floats of at most 8 "
                f"bytes, got dtype {self.dtype}; convert it first"
            )
        if self.compression not in COMPRESSIONS:
            raise DataError(f"compression must be None or zstd, got {self.compression!r}")

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        dtype: str | np.dtype[Any],
        *,
        ragged: bool = False,
        compression: str | None = None,
    ) -> Self:
        """Return a field with the given dtype, converted to little-endian byte order."""
        return cls(
            shape=tuple(map(int, shape)),
            dtype=np.dtype(dtype).newbyteorder("<").str,
            ragged=ragged,
            compression=compression,
        )

    @property
    def sample_bytes(self) -> int:
        """Bytes of one decoded sample. In a ragged field, bytes of one row."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Offsets and checksums of the datasets of one field in a shard."""

    offset: int | None  # first byte of ``/data/<field>``, None if only HDF5 can read it
    crc_offset: int | None  # first byte of ``/crc/<field>``, None if only HDF5 can read it
    crc32: int  # crc32 of the table ``/crc/<field>``
    index_offset: int | None = None  # first byte of ``/index/<field>`` of a ragged field
    index_crc32: int | None = None  # crc32 of ``/index/<field>``
    num_rows: int | None = None
    """Rows of ``/data/<field>`` if the field is ragged: the sum of the lengths of its samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """Name, size and checksum of one shard, an HDF5 file, and the places of its fields."""

    file: str  # file name in the directory of the data set
    num_samples: int
    num_bytes: int
    crc32: int
    places: Mapping[str, Place]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Contents of ``manifest.json``: the fields and the shards of a data set."""

    uuid: str
    split: str
    block_size: int  # samples per crc32, counted from the start of each shard
    fields: Mapping[str, Field]
    shards: tuple[ShardEntry, ...]
    classes: tuple[str, ...] = ()
    """Names of the labels 0, 1, ...; ``classes.txt`` is a human-readable copy."""

    def __post_init__(self) -> None:
        if not PLAIN_NAME.fullmatch(self.split):
            raise DataError(f"a split must be a word such as train, got {self.split!r}")
        if not self.fields:
            raise DataError(
                'a data set must have at least one field, such as {"x": ((8, 8), "f4")}, got none'
            )
        for name in self.fields:
            if not name.isidentifier():
                raise DataError(f"a field must have the name of a Python variable, got {name!r}")
        if self.block_size < 1:
            raise DataError(f"block_size must be positive, got {self.block_size}")
        for shard in self.shards:
            self._check_shard(shard)

    @property
    def num_samples(self) -> int:
        """Number of samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards on disk."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def sample_bytes(self) -> float:
        """Mean size of a decoded sample in bytes, all fields together."""
        total = sum(
            self.num_rows(name) * field.sample_bytes for name, field in self.fields.items()
        )
        return total / max(1, self.num_samples)

    def num_rows(self, name: str) -> int:
        """Return the rows of a field: one per sample, or, if ragged, the sum of all lengths."""
        if not self.fields[name].ragged:
            return self.num_samples
        return sum(shard.places[name].num_rows or 0 for shard in self.shards)

    def samples_of(self, index: int) -> tuple[int, int]:
        """Return the range ``[start, stop)`` of the samples in shard ``index``."""
        start = sum(shard.num_samples for shard in self.shards[:index])
        return start, start + self.shards[index].num_samples

    def num_blocks(self, shard: ShardEntry) -> int:
        """Return the number of blocks of a shard; the last block may be short."""
        return -(-shard.num_samples // self.block_size)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read and check the manifest of a data set.

        Raises:
            DataError: the manifest is missing, changed, damaged or of a later version.
        """
        path = directory / MANIFEST
        try:
            record = json.loads(path.read_text())
            fault = fault_of(record, VERSION) if record["format"] == FORMAT else ""
            if not fault:
                return cls._from_record(record)
        except FileNotFoundError:
            raise DataError(
                f"a data set must have a {MANIFEST}, but {directory} has none; create it with "
                f"hpctrain data pack, or pass the right directory"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read {path}: {reason_of(error)}; check the mount") from error
        except _DAMAGE as error:
            why = error if isinstance(error, (DataError, ValueError)) else repr(error)
            raise DataError(
                f"{path} must be the manifest of a data set, but has an error: {why}; write the "
                f"data set again"
            ) from None
        raise DataError(f"{path} cannot be read: {fault}")

    def write(self, directory: Path) -> None:
        """Write the manifest, which publishes the data set.

        Raises ``OSError``: the file cannot be written; an older manifest is unchanged.
        """
        record = self._to_record()
        with publishing(directory / MANIFEST) as part:
            part.write_text(json.dumps({"crc32": _crc32(record), **record}, indent=1) + "\n")

    def fields_record(self) -> dict[str, Any]:
        """Return the fields as JSON values, for the manifest and the attributes of shards."""
        return {
            name: {
                "shape": field.shape,
                "dtype": field.dtype,
                "ragged": field.ragged,
                "filter": field.compression,
            }
            for name, field in self.fields.items()
        }

    def _to_record(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **stamp(VERSION, READER),
            "uuid": self.uuid,
            "split": self.split,
            "n": self.num_samples,
            "block_size": self.block_size,
            "fields": self.fields_record(),
            "shards": [shard_record(shard) for shard in self.shards],
            **({"classes": list(self.classes)} if self.classes else {}),
        }

    @classmethod
    def _from_record(cls, record: dict[str, Any]) -> Self:
        if record["format"] != FORMAT:
            raise DataError(f"its format must be {FORMAT!r}, got {record['format']!r}")
        if record.pop("crc32", None) != _crc32(record):
            raise DataError("its crc32 is wrong, so it was changed or damaged")
        if not record["shards"]:
            raise DataError("it must name at least one shard, got none")
        _check_numbers(record)
        return cls(
            uuid=record["uuid"],
            split=record["split"],
            block_size=record["block_size"],
            fields={
                name: Field(
                    shape=tuple(field["shape"]),
                    dtype=field["dtype"],
                    ragged=field["ragged"],
                    compression=field["filter"],
                )
                for name, field in record["fields"].items()
            },
            shards=tuple(map(shard_of, record["shards"])),
            classes=tuple(map(str, record.get("classes", ()))),
        )

    def _check_shard(self, shard: ShardEntry) -> None:
        if not PLAIN_NAME.fullmatch(shard.file):
            raise DataError(f"a shard must be a plain file name, got {shard.file!r}")
        if shard.num_samples < 1:
            raise DataError(f"shard {shard.file} must have samples, got {shard.num_samples}")
        if shard.places.keys() != self.fields.keys():
            raise DataError(
                f"shard {shard.file} must have the fields {sorted(self.fields)}, "
                f"got {sorted(shard.places)}"
            )
        for name, place in shard.places.items():
            field = self.fields[name]
            index = (place.index_crc32, place.num_rows)
            if (None not in index) != field.ragged:
                raise DataError(
                    f"a field must have an index if and only if it is ragged, but field {name} of "
                    f"shard {shard.file} is{'' if field.ragged else ' not'} ragged and has the "
                    f"crc32 and rows {index}"
                )
            num_rows = shard.num_samples if place.num_rows is None else place.num_rows
            for offset, size in (
                (place.offset, num_rows * field.sample_bytes),
                (place.crc_offset, 4 * self.num_blocks(shard)),
                (place.index_offset, 8 * (shard.num_samples + 1)),
            ):
                if offset is not None and not 0 <= offset <= shard.num_bytes - size:
                    raise DataError(
                        f"field {name} must end inside its shard, but has {size} bytes from "
                        f"byte {offset} and shard {shard.file} has {shard.num_bytes}"
                    )


def _crc32(record: Mapping[str, Any]) -> int:
    return crc32(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())


_KEYS = {"num_samples": "n", "num_bytes": "bytes", "places": "fields"}
"""JSON keys of the attributes of ``ShardEntry`` that have another name in JSON."""


def shard_of(record: Mapping[str, Any]) -> ShardEntry:
    """Return the entry of a shard from its JSON record."""
    values = {name: record[_KEYS.get(name, name)] for name in ShardEntry.__slots__}
    places = {name: Place(**place) for name, place in values["places"].items()}
    return ShardEntry(**{**values, "places": places})


def shard_record(shard: ShardEntry) -> dict[str, Any]:
    """Return the JSON record of a shard."""
    record = {_KEYS.get(name, name): value for name, value in asdict(shard).items()}
    for place in record["fields"].values():
        # Earlier versions of hpctrain reject unknown keys, so write these only for ragged fields.
        for key in (
            ("index_offset", "index_crc32", "num_rows") if place["num_rows"] is None else ()
        ):
            del place[key]
    return record


def _check_numbers(value: object) -> None:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_numbers(one)
    elif isinstance(value, float) or (isinstance(value, int) and not 0 <= value < _MOST):
        raise DataError(f"its numbers must be integers, at least 0 and below 2^62, got {value}")


def shard_file(split: str, uuid: str, shard: int, num_shards: int) -> str:
    """Return the file name of a published shard.

    The name contains the first 8 digits of the uuid, so a new data set and the data set that it
    replaces have different shard names.
    """
    return f"{split}-{uuid[:8]}-{shard:05d}-of-{num_shards:05d}.h5"


def shard_part(split: str, uuid: str, rank: int, shard: int) -> str:
    """Return the file name of the ``shard``-th shard of ``rank`` before publication."""
    return f"{split}-{uuid[:8]}-r{rank:05d}-{shard:05d}.h5{PART}"


def leftovers(directory: Path, manifest: Manifest | None) -> tuple[str, ...]:
    """Return the names of the files that killed writers left, and of shards not in the manifest.

    Without a manifest, only unfinished files are returned, because the finished shards may be all
    that remains of a data set.
    """
    named = {shard.file for shard in manifest.shards} if manifest else set()
    with suppress(OSError):
        names = {path.name for path in directory.iterdir()} - named
        return tuple(
            name
            for name in sorted(names)
            if name in (MANIFEST + PART, LOCK)
            or _JOURNAL.fullmatch(name)
            or (SHARD_FILE.fullmatch(name) and (manifest or name.endswith(PART)))
        )
    return ()


def classes_of(directory: Path, manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the labels 0, 1, ... from the manifest, or else from ``classes.txt``."""
    return manifest.classes or read_classes(directory)


def read_classes(directory: Path) -> tuple[str, ...]:
    """Return the names in ``classes.txt``; empty if the file does not exist or is unreadable."""
    try:
        text = (directory / CLASSES).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ()
    # splitlines() also splits at characters that a name may contain.
    return tuple(text.removesuffix("\n").split("\n")) if text else ()


def write_classes(directory: Path, classes: tuple[str, ...]) -> None:
    """Write ``classes.txt`` if there are classes. Raises ``OSError``: it cannot be written."""
    if classes:
        with publishing(directory / CLASSES) as part:
            part.write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")


Range = tuple[int, int]
"""Samples ``[start, stop)`` of a data set."""


def merged_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the union of ranges, in ascending order, as ranges that do not touch."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)
