"""Read a checkpoint on any number of ranks: check every byte, and execute no stored code."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.format.manifest import (
    PRIVATE,
    CheckpointManifest,
    Record,
    StoredPart,
    file_name,
    read_bytes,
)
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.checkpoint.format.state_tree import unflatten
from hpctrain.checkpoint.format.tensor_file import (
    BLOCK_BYTES,
    DTYPES,
    TensorFile,
    opened,
)
from hpctrain.checkpoint.refusal import explained, printable
from hpctrain.comm.agreement import agreed, on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.tensor_arguments import host_bytes
from hpctrain.core.errors import CheckpointError
from hpctrain.core.paths import absolute

_Stored = tuple[str, str, StoredPart]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Step, state, facts and private values of a loaded checkpoint."""

    state: Any
    private: "Privates"  # private values of each rank that saved
    facts: dict[str, Any]
    step: int


def load(
    directory: Path | str, comm: Communicator, *, into: Mapping[str, Shard] | None = None
) -> Loaded:
    """Read a checkpoint that any number of ranks wrote.

    Collective. Every rank gets the whole state with tensors on the CPU, except that it gets only
    a part of each tensor in ``into``. Each rank checks the checksums of the blocks that it reads.

    Args:
        directory: directory of the checkpoint.
        comm: the ranks that read.
        into: by path, the part of a tensor that this rank wants. In the state, the tensor is
            replaced by a ``TensorPiece``, and only the file blocks of this part are read.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged or hostile, or lacks a
            tensor of ``into``; on every rank.
    """
    what = f"read checkpoint {directory}"
    read = explained(what)(lambda: read_bytes(absolute(directory)))
    data = on_root(comm, read, CheckpointError)
    with agreed(comm, CheckpointError), explained(what):
        directory = absolute(directory)
        manifest = CheckpointManifest.parse(data, directory)
        state = _read_state(manifest, directory, into or {}, comm.rank)
        private = Privates(directory, manifest)
        private.get(comm.rank)
    return Loaded(state, private, manifest.facts, manifest.step)


def check(directory: Path | str) -> list[str]:
    """Read every file of a checkpoint, and return its faults. Not collective.

    Everything that ``load`` refuses on any number of ranks is a fault.
    """
    directory = Path(directory)
    try:
        manifest = CheckpointManifest.read(directory)
    except CheckpointError as error:
        return [str(error)]
    everything = [manifest.tensors, *manifest.private.values()]
    checks: list[Callable[[], object]] = [
        partial(_check_file, directory / file_name(rank), parts)
        for rank, parts in sorted(_by_rank(everything).items())
    ]
    # A state may be invalid although all files are intact.
    checks.append(
        partial(_assembled, directory, manifest.skeleton, dict.fromkeys(manifest.tensors))
    )
    checks += [
        partial(_private_tree, directory, of, dict.fromkeys(of))
        for of in manifest.private.values()
        if PRIVATE in of
    ]
    faults = []
    for action in checks:
        try:
            with explained(f"read checkpoint {directory}"):
                action()
        except CheckpointError as error:
            faults.append(str(error))
    return list(dict.fromkeys(faults))


class Privates(Mapping[int, Any]):
    """Mapping from each rank of the save to its private values, which are read on demand."""

    def __init__(self, directory: Path, manifest: CheckpointManifest) -> None:
        self._directory = directory
        self._records = {rank: of for rank, of in manifest.private.items() if PRIVATE in of}
        self._read: dict[int, Any] = {}

    def __getitem__(self, rank: int) -> Any:
        """Return the private values of a rank. Not collective.

        Raises ``KeyError``: the save had no such rank, or no private values of the rank.
        ``CheckpointError``: the file of the rank is damaged.
        """
        if rank not in self._read:
            records = self._records[rank]
            with explained(f"read checkpoint {self._directory}"):
                self._read[rank] = _private_tree(
                    self._directory, records, _read(self._directory, records, {})
                )
        return self._read[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


def _private_tree(
    directory: Path, records: Mapping[str, Record], tensors: Mapping[str, Any]
) -> Any:
    """Return the private values of a rank, given its private tensors by name."""
    text = _read(directory, {PRIVATE: records[PRIVATE]}, {})[PRIVATE]
    try:
        skeleton = json.loads(bytes(host_bytes(text)))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {directory} is damaged: the private values of a rank are not JSON: "
            f"{error}; use another checkpoint"
        ) from error
    return _assembled(directory, skeleton, tensors, f"{PRIVATE}/")


def _read_state(
    manifest: CheckpointManifest, directory: Path, into: Mapping[str, Shard], rank: int
) -> Any:
    if missing := sorted(set(into) - set(manifest.tensors)):
        raise CheckpointError(
            f"the tensors of into must be in the checkpoint, but {directory} has no "
            f"{', '.join(missing)}; choose from its tensors, "
            f"{printable(', '.join(list(manifest.tensors)[:20]))}"
        )
    for path, shard in into.items():
        if shard.global_shape != (shape := manifest.tensors[path].shape):
            raise CheckpointError(
                f"the tensor {path} must have the shape in the checkpoint, {list(shape)}, got "
                f"{list(shard.global_shape)}; change the model, or convert the checkpoint"
            )
    tensors = _read(directory, manifest.tensors, into, first=rank % manifest.world)
    pieces = {path: TensorPiece(tensors[path], shard) for path, shard in into.items()}
    return _assembled(directory, manifest.skeleton, {**tensors, **pieces})


def _read(
    directory: Path, records: Mapping[str, Record], into: Mapping[str, Shard], first: int = 0
) -> dict[str, Tensor]:
    """Read tensors, or the parts of them in ``into``, file by file.

    The file of rank ``first`` is read first; different ``first`` on each rank spread the load.
    """
    pieces = {}
    for name, record in records.items():
        shard = into.get(name) or Shard.whole(record.shape)
        pieces[name] = TensorPiece(torch.empty(shard.shape, dtype=DTYPES[record.dtype]), shard)
    stored = _by_rank([records], {name: piece.shard for name, piece in pieces.items()})
    for rank in sorted(stored, key=lambda rank: (rank < first, rank)):
        with opened(directory / file_name(rank)) as file:
            for name, dtype, part in stored[rank]:
                file.check(name, dtype, part.shard.shape)
                _read_part(file, name, part, pieces[name])
    return {name: piece.tensor for name, piece in pieces.items()}


def _read_part(file: TensorFile, name: str, part: StoredPart, target: TensorPiece) -> None:
    common = part.shard.intersection(target.shard)
    assert common
    place = target.tensor[target.shard.slices(common)]
    if common == part.shard and place.is_contiguous():
        file.read_into(name, 0, host_bytes(place), part.crcs)
        return
    itemsize = place.itemsize
    start, stop = part.shard.span(common)
    first = start * itemsize // BLOCK_BYTES * BLOCK_BYTES
    last = min(-(-stop * itemsize // BLOCK_BYTES) * BLOCK_BYTES, part.shard.numel * itemsize)
    around = torch.empty((last - first) // itemsize, dtype=place.dtype)
    file.read_into(name, first, host_bytes(around), part.crcs)
    strides = torch.empty(part.shard.shape, device="meta").stride()
    place.copy_(around.as_strided(common.shape, strides, start - first // itemsize))


def _assembled(
    directory: Path, skeleton: object, leaves: Mapping[str, Any], prefix: str = ""
) -> Any:
    def leaf(path: str) -> Any:
        if prefix + path not in leaves:
            raise CheckpointError(
                f"the skeleton of the state names the tensor {path[:80]!r}, but the manifest "
                f"does not"
            )
        return leaves[prefix + path]

    try:
        return unflatten(skeleton, leaf)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint {directory} is damaged: {error}; use another checkpoint"
        ) from error


def _by_rank(
    groups: Sequence[Mapping[str, Record]], wanted: Mapping[str, Shard] | None = None
) -> dict[int, list[_Stored]]:
    """Return by rank the stored parts that it wrote; with ``wanted``, only overlapping parts."""
    stored: dict[int, list[_Stored]] = {}
    for name, record in (item for records in groups for item in records.items()):
        for part in record.parts:
            if wanted is None or part.shard.intersection(wanted[name]):
                stored.setdefault(part.rank, []).append((name, record.dtype, part))
    return stored


def _check_file(path: Path, stored: Sequence[_Stored]) -> None:
    with opened(path) as file:
        for name, dtype, part in stored:
            file.check(name, dtype, part.shard.shape)
            num_bytes = part.shard.numel * DTYPES[dtype].itemsize
            memory = memoryview(bytearray(min(num_bytes, BLOCK_BYTES)))
            for start in range(0, num_bytes, BLOCK_BYTES):
                file.read_into(name, start, memory[: num_bytes - start], part.crcs)
