"""Manifest of a checkpoint, which lists its tensors and files and is written last.

The header of each file lists the parts of tensors in the file, and the manifest has the checksum
of each header, so its size does not depend on the number of parts. Manifests of versions 1 and 2
list all parts.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.checkpoint.format.shard import Shard, fault_of_cover
from hpctrain.checkpoint.format.tensor_file import BLOCK_BYTES, DTYPES, open_regular
from hpctrain.checkpoint.refusal import damaged
from hpctrain.core.atomic import reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import CheckpointError
from hpctrain.core.formats import fault_of, stamp
from hpctrain.core.units import GIB

NAME = "manifest.json"
VERSION, READER = 3, "1.0"
"""Newest version of the format, and the first hpctrain that reads it. In version 1 each rank has
a file; since version 2 ranks share files."""

PRIVATE = "%private"
"""Prefix of private values in the file of a rank; no path of a state has it."""

_FORMAT = "hpctrain checkpoint"
_DIRECTORY = re.compile(r"step-(\d{8,})")
_OF_RANK = re.compile(r"%rank-(\d+)/(.*)", re.DOTALL)
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


class FileRecord(NamedTuple):
    """A file of a checkpoint, named after the first of its ranks."""

    ranks: tuple[range, ...]  # the ranks that wrote the file
    private: tuple[range, ...]  # those with private values
    private_bytes: int  # bytes of all private values in the file
    header_crc: int

    @property
    def first_rank(self) -> int:
        """The rank after which the file is named."""
        return self.ranks[0].start


@dataclass(frozen=True, slots=True)
class Record:
    """Dtype, shape and stored parts of a tensor; each element is in exactly one part."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...] = ()
    files: tuple[int, int] | None = None
    """First rank of the first and of the last file with parts; None if ``parts`` has all parts."""

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
    files: tuple[FileRecord, ...] = ()
    """Files, ordered by first rank; empty in versions 1 and 2, whose records list all parts."""
    private: Mapping[int, dict[str, Record]] = field(default_factory=dict)
    """Only in versions 1 and 2: private tensors of each rank that has any, by name in its file."""

    @property
    def first_ranks(self) -> list[int]:
        """First rank of each file."""
        own = (record for records in self.private.values() for record in records.values())
        listed = (part.file for record in (*self.tensors.values(), *own) for part in record.parts)
        return [file.first_rank for file in self.files] or sorted({*listed})

    @property
    def state_bytes(self) -> int:
        """Bytes of all tensors of the state."""
        return sum(record.num_bytes for record in self.tensors.values())

    @property
    def private_bytes(self) -> int:
        """Bytes of all private values."""
        own = [record for records in self.private.values() for record in records.values()]
        return sum(r.num_bytes for r in own) + sum(file.private_bytes for file in self.files)

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
        with valid(path):
            given = json.loads(data)
            if given["format"] != _FORMAT:
                raise damaged(path, f"its format must be {_FORMAT!r}, got {given['format']!r}")
            if fault := fault_of(given, VERSION):
                raise CheckpointError(f"checkpoint {directory} cannot be read: {fault}")
            found = _manifest(given, path)
            require_named(directory, found.step)
        return found

    def to_bytes(self) -> bytes:
        """Return the contents of the manifest file."""
        given = {
            "format": _FORMAT,
            **stamp(VERSION, READER),
            "step": self.step,
            "world": self.world,
            "facts": self.facts,
            "tensors": {
                path: {"dtype": record.dtype, "shape": record.shape, "files": record.files}
                for path, record in self.tensors.items()
            },
            "files": [
                {
                    "ranks": [[run.start, run.stop] for run in file.ranks],
                    "private": [[run.start, run.stop] for run in file.private],
                    "private_bytes": file.private_bytes,
                    "header_crc32": file.header_crc,
                }
                for file in self.files
            ],
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
    """Raise ``CheckpointError`` for an invalid step, or a directory named after another step.

    Called with the directory and the step of a checkpoint that is read or is to be written. A
    directory without a step in its name may contain any checkpoint.
    """
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise CheckpointError(
            f"the step of a checkpoint must be an integer from 0 to 2**63 - 1, got {step!r}; pass "
            f"the number of steps that were taken"
        )
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
    """Return the name of the file whose first rank is ``rank``."""
    return f"rank-{rank:05d}.safetensors"


def entry_name(name: str, rank: int, first_rank: int) -> str:
    """Return the name in the file of ``first_rank`` for tensor ``name`` of ``rank``."""
    return name if rank == first_rank else f"%rank-{rank}/{name}"


def runs_of(ranks: Iterable[int]) -> tuple[range, ...]:
    """Return ascending ranks as ranges of consecutive ranks."""
    runs: list[range] = []
    for rank in ranks:
        if runs and runs[-1].stop == rank:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return tuple(runs)


def split_entry(entry: str, first_rank: int) -> tuple[str, int]:
    """Return the arguments ``name`` and ``rank`` for which ``entry_name`` returns ``entry``."""
    if not (match := _OF_RANK.fullmatch(entry)):
        return entry, first_rank
    return match[2], int(match[1])


def dumps(value: Any) -> str:
    """Write a value as JSON on one line.

    Raises ``TypeError`` or ``ValueError``: JSON cannot represent the value.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _manifest(given: Any, path: Path) -> CheckpointManifest:
    world, version = _natural(given["world"]), given["version"]
    if world < 1:
        raise ValueError("the number of ranks that wrote the checkpoint is 0")
    if not isinstance(given["facts"], dict):
        raise TypeError("the facts are not a JSON object")
    make = partial(
        CheckpointManifest,
        step=_natural(given["step"]),
        world=world,
        facts=given["facts"],
        skeleton=given["skeleton"],
    )
    if version > 2:
        files = tuple(map(_file, given["files"]))
        runs = sorted((run.start, run.stop) for file in files for run in file.ranks)
        if [0, *(stop for _, stop in runs)] != [*(start for start, _ in runs), world]:
            raise ValueError(
                f"each of {world} ranks must be in exactly one file, got files of ranks {runs}"
            )
        tensors = {name: _listed(record) for name, record in given["tensors"].items()}
        found = make(files=files, tensors=tensors)
    else:
        of_ranks = tuple(map(_natural, given["files"])) if version > 1 else ()
        if version > 1 and (
            len(of_ranks) != world
            or any(first >= world or of_ranks[first] != first for first in of_ranks)
        ):
            raise ValueError("files does not contain the first rank of a file for each rank")
        private = _PrivateRecords(given["private"], world, of_ranks, path)
        found = make(tensors=_records(given["tensors"], world, of_ranks), private=private)
    if foreign := [path for path in found.tensors if path.startswith(PRIVATE)]:
        raise ValueError(f"{foreign[0]} is not the path of a tensor")
    return found


def _file(given: Mapping[str, Any]) -> FileRecord:
    ranks, private = (
        tuple(range(*map(_natural, run)) for run in given[name]) for name in ("ranks", "private")
    )
    if not all(run for run in (*ranks, *private)) or not ranks:
        raise ValueError("the ranks of a file are not ranges")
    return FileRecord(
        ranks, private, _natural(given["private_bytes"]), _natural(given["header_crc32"])
    )


def _listed(given: Mapping[str, Any]) -> Record:
    first, last = map(_natural, given["files"])
    return Record(*_spec(given), files=(first, last))


class _PrivateRecords(Mapping[int, dict[str, Record]]):
    """Private tensors by rank, parsed when a rank is looked up, as most ranks are not needed.

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
        with valid(self._path):
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
def valid(path: Path) -> Iterator[None]:
    """Convert errors of the block, which parses the file at ``path``, to ``CheckpointError``."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(path, f"{type(error).__name__} {error}") from error


def _records(given: Mapping[str, Any], world: int, files: Sequence[int]) -> dict[str, Record]:
    return {path: _record(path, record, world, files) for path, record in given.items()}


def _spec(given: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    shape, dtype = tuple(map(_natural, given["shape"])), given["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"a tensor has the unknown dtype {str(dtype)[:40]!r}")
    return dtype, shape


def _record(path: str, given: Mapping[str, Any], world: int, files: Sequence[int]) -> Record:
    dtype, shape = _spec(given)
    ranks = [_natural(part["rank"]) for part in given["parts"]]
    if len({*ranks}) != len(ranks) or not all(rank < world for rank in ranks):
        raise ValueError(f"the parts of {path} are not stored by different ranks below {world}")
    parts = tuple(
        _part(part, Record(dtype, shape), rank, files[rank] if files else rank)
        for part, rank in zip(given["parts"], ranks, strict=True)
    )
    if fault := fault_of_cover(shape, [part.shard for part in parts]):
        raise ValueError(f"{path}: {fault}")
    return Record(dtype, shape, parts)


def _part(given: Mapping[str, Any], record: Record, rank: int, file: int) -> StoredPart:
    offset, shape, crcs = (tuple(map(_natural, given[k])) for k in ("offset", "shape", "crc32"))
    return part_of(record, offset, shape, crcs, rank, file)


def part_of(
    record: Record,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    crcs: tuple[int, ...],
    rank: int,
    file: int,
) -> StoredPart:
    """Return a part of a tensor; raise ``ValueError`` if it is not valid."""
    try:
        shard = Shard(record.shape, offset, shape)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    num_bytes = shard.numel * DTYPES[record.dtype].itemsize
    if len(crcs) != -(-num_bytes // BLOCK_BYTES):
        raise ValueError(f"a part of {num_bytes} bytes has {len(crcs)} checksums")
    return StoredPart(rank, shard, crcs, file)


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"a number must be an integer of at least 0, got {str(value)[:40]}")
    return value
