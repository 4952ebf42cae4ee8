"""Manifest of a checkpoint, which lists its tensors and files and is written last."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.format.shard import Shard, fault_of_cover
from hpctrain.checkpoint.format.tensor_file import BLOCK_BYTES, DTYPES, open_regular
from hpctrain.checkpoint.refusal import damaged
from hpctrain.core.atomic import reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import CheckpointError
from hpctrain.core.units import GIB

NAME = "manifest.json"
VERSION = 2
"""Newest version: ranks share files. Without shared files, the version is 1."""

PRIVATE = "%private"
"""Prefix of private values in the file of a rank; no path of a state has it."""

_FORMAT = "hpctrain checkpoint"
_DIRECTORY = re.compile(r"step-(\d{8,})")
_FIRST_LINE = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor that one rank wrote, with the crc32 of each block of the part."""

    rank: int
    shard: Shard
    crcs: tuple[int, ...]
    file: int  # first rank of the ranks that share the file

    def entry(self, name: str) -> str:
        """Return the name of the part of tensor ``name`` in the file."""
        return entry_name(name, self.rank, self.file)


@dataclass(frozen=True, slots=True)
class Record:
    """Dtype, shape and stored parts of a tensor; each element is in exactly one part."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return Shard.whole(self.shape).numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest:
    """Contents of the manifest of a checkpoint: plain values, tensors and their files."""

    step: int
    world: int  # number of ranks that wrote the checkpoint
    facts: dict[str, Any]
    skeleton: Any
    tensors: dict[str, Record]
    """Tensors of the state, by path, which is also their name in the files."""
    files: tuple[int, ...]
    """First rank of the ranks that share a file, for each rank; empty if no ranks share a file."""
    private: Mapping[int, dict[str, Record]]
    """Tensors of each rank that has private values, by name in its file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        own = [record for records in self.private.values() for record in records.values()]
        return sum(record.num_bytes for record in (*self.tensors.values(), *own))

    @classmethod
    def read(cls, directory: Path | str) -> "CheckpointManifest":
        """Read the manifest of a checkpoint.

        Raises ``CheckpointError``: the manifest is missing, damaged or hostile.
        """
        return cls.parse(read_bytes(directory), directory)

    @classmethod
    def parse(cls, data: bytes, directory: Path | str) -> "CheckpointManifest":
        """Parse the bytes of the manifest of ``directory``."""
        path = Path(directory) / NAME
        first = _FIRST_LINE.match(data)
        if not first:
            raise damaged(path, "its first line is not the first line of a manifest")
        if crc32(data[first.end() :]) != int(first[1], 16):
            raise damaged(path, "its crc32 is wrong")
        with _valid(path):
            given = json.loads(data)
            version = given["version"]
            if given["format"] != _FORMAT or type(version) is not int:
                raise damaged(path, f"its format must be {_FORMAT!r}, got {given['format']!r}")
            if version > VERSION:
                raise CheckpointError(
                    f"checkpoint {directory} has version {version}, but this hpctrain reads "
                    f"versions up to {VERSION}; use a newer hpctrain"
                )
            found = _manifest(given, path)
            require_named(directory, found.step)
        return found

    def to_bytes(self) -> bytes:
        """Return the contents of the manifest file."""
        given = {
            "format": _FORMAT,
            "version": VERSION if self.files else 1,
            "step": self.step,
            "world": self.world,
            **({"files": self.files} if self.files else {}),
            "facts": self.facts,
            "tensors": {path: _record_in_json(record) for path, record in self.tensors.items()},
            "private": {
                str(rank): {name: _record_in_json(record) for name, record in records.items()}
                for rank, records in self.private.items()
            },
            "skeleton": self.skeleton,
        }
        lines = (f"{json.dumps(key)}: {dumps(value)}" for key, value in given.items())
        body = (",\n".join(lines) + "\n}\n").encode()
        return b'{"crc32": "%08x",\n' % crc32(body) + body


def name_of(step: int) -> str:
    """Return the name of the directory of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's directory; None for all other names."""
    match = _DIRECTORY.fullmatch(name)
    return int(match[1]) if match and name_of(int(match[1])) == name else None


def require_named(directory: Path | str, step: int) -> None:
    """Raise ``CheckpointError`` if a directory is named after another step than ``step``.

    Called with the directory and the step of a checkpoint that is read or is to be written. A
    directory without a step in its name may contain any checkpoint.
    """
    if step_of(Path(directory).name) not in (None, step):
        raise CheckpointError(
            f"a directory with the name of a step must contain the checkpoint of that step, but "
            f"{directory} is used for the checkpoint of step {step}; use the name "
            f"{name_of(step)}"
        )


def read_bytes(directory: Path | str) -> bytes:
    """Read the manifest file of a checkpoint.

    Raises ``CheckpointError``: the file is missing, cannot be read or is larger than 1 GiB.
    """
    path = Path(directory) / NAME
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(GIB + 1)
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no checkpoint {directory}, or its save did not finish: {NAME} is missing; "
            f"use another checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {reason_of(error)}; check its permissions, or use another "
            f"checkpoint"
        ) from error
    if len(data) > GIB:
        raise damaged(path, "the file is larger than 1 GiB")
    return data


def file_name(rank: int) -> str:
    """Return the name of the file of a rank and of the ranks that share its file."""
    return f"rank-{rank:05d}.safetensors"


def entry_name(name: str, rank: int, first_rank: int) -> str:
    """Return the name of a tensor of ``rank`` in the file of ``first_rank``."""
    return name if rank == first_rank else f"%rank-{rank}/{name}"


def dumps(value: Any) -> str:
    """Write a value as JSON on one line.

    Raises ``TypeError`` or ``ValueError``: JSON cannot represent the value.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _record_in_json(record: Record) -> dict[str, Any]:
    parts = [
        {"rank": part.rank, "offset": part.shard.offset, "shape": part.shard.shape,
         "crc32": part.crcs}
        for part in record.parts
    ]  # fmt: skip
    return {"dtype": record.dtype, "shape": record.shape, "parts": parts}


def _manifest(given: Any, path: Path) -> CheckpointManifest:
    world = _natural(given["world"])
    if world < 1:
        raise ValueError("the number of ranks that wrote the checkpoint is 0")
    files = tuple(map(_natural, given["files"])) if given["version"] > 1 else ()
    if given["version"] > 1 and (
        len(files) != world or any(first >= world or files[first] != first for first in files)
    ):
        raise ValueError("files does not contain the first rank of a file for each rank")
    tensors = _records(given["tensors"], world, files)
    if foreign := [path for path in tensors if path.startswith(PRIVATE)]:
        raise ValueError(f"{foreign[0]} is not the path of a tensor")
    if not isinstance(given["facts"], dict):
        raise TypeError("the facts are not a JSON object")
    return CheckpointManifest(
        step=_natural(given["step"]),
        world=world,
        facts=given["facts"],
        skeleton=given["skeleton"],
        tensors=tensors,
        files=files,
        private=_PrivateRecords(given["private"], world, files, path),
    )


class _PrivateRecords(Mapping[int, dict[str, Record]]):
    """Private tensors of the ranks, parsed when they are used: a rank needs its own only.

    Raises ``CheckpointError``: the records of a rank are not valid.
    """

    def __init__(
        self, given: Mapping[str, Any], world: int, files: Sequence[int], path: Path
    ) -> None:
        of_ranks = {int(rank): records for rank, records in given.items()}
        self._given = {rank: records for rank, records in of_ranks.items() if PRIVATE in records}
        self._world, self._files, self._path = world, files, path

    def __getitem__(self, rank: int) -> dict[str, Record]:
        given = self._given[rank]
        with _valid(self._path):
            records = _records(given, self._world, self._files)
            for name, record in records.items():
                if any(part.rank != rank for part in record.parts) or not name.startswith(PRIVATE):
                    raise ValueError(f"{name} is not a private value of rank {rank}")
        return records

    def __iter__(self) -> Iterator[int]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


@contextmanager
def _valid(path: Path) -> Iterator[None]:
    """Raise ``CheckpointError`` if the block finds that the manifest at ``path`` is not valid."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(path, f"{type(error).__name__} {error}") from error


def _records(given: Mapping[str, Any], world: int, files: Sequence[int]) -> dict[str, Record]:
    return {path: _record(path, record, world, files) for path, record in given.items()}


def _record(path: str, given: Mapping[str, Any], world: int, files: Sequence[int]) -> Record:
    shape = tuple(map(_natural, given["shape"]))
    dtype = given["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"{path} has the unknown dtype {str(dtype)[:40]!r}")
    ranks = [_natural(part["rank"]) for part in given["parts"]]
    if len({*ranks}) != len(ranks) or not all(rank < world for rank in ranks):
        raise ValueError(f"the parts of {path} are not stored by different ranks below {world}")
    itemsize = DTYPES[dtype].itemsize
    parts = tuple(
        _part(part, shape, itemsize, rank, files[rank] if files else rank)
        for part, rank in zip(given["parts"], ranks, strict=True)
    )
    if fault := fault_of_cover(shape, [part.shard for part in parts]):
        raise ValueError(f"{fault} of {path}")
    return Record(dtype, shape, parts)


def _part(
    given: Mapping[str, Any], shape: tuple[int, ...], itemsize: int, rank: int, file: int
) -> StoredPart:
    box = [tuple(map(_natural, given[name])) for name in ("offset", "shape")]
    try:
        shard = Shard(shape, *box)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    crcs = tuple(map(_natural, given["crc32"]))
    if len(crcs) != -(-shard.numel * itemsize // BLOCK_BYTES):
        raise ValueError(f"a part of {shard.numel * itemsize} bytes has {len(crcs)} checksums")
    return StoredPart(rank, shard, crcs, file)


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"numbers must be integers at least 0, got {str(value)[:40]}")
    return value
