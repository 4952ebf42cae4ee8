"""Read a checkpoint on any number of ranks: check every byte, and execute no stored code."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint import block_reader
from hpctrain.checkpoint.block_reader import StoredTensor
from hpctrain.checkpoint.format.manifest import (
    NAME,
    PRIVATE,
    CheckpointManifest,
    Record,
    file_name,
    read_bytes,
)
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.checkpoint.format.state_tree import unflatten
from hpctrain.checkpoint.format.tensor_file import BLOCK_BYTES, DTYPES, opened
from hpctrain.checkpoint.part_lists import PartIndex
from hpctrain.checkpoint.refusal import damaged, explained, printable
from hpctrain.comm.agreement import agreed, on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.tensor_arguments import host_bytes
from hpctrain.comm.threaded import start_on
from hpctrain.core.checks import checked
from hpctrain.core.errors import CheckpointError
from hpctrain.core.paths import absolute


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
    a part of each tensor in ``into``. The ranks of a node divide the blocks that any of them
    needs; each block is read and checked once per node.

    Args:
        directory: directory of the checkpoint.
        comm: the ranks that read.
        into: by path, the part of a tensor that this rank wants. In the state, the tensor is
            replaced by a ``TensorPiece``, and only the file blocks of this part are read.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged or hostile, or lacks a
            tensor of ``into``, or the ranks pass different directories; on every rank.
    """
    what = f"read checkpoint {directory}"
    name, data = _manifest_bytes(directory, comm)
    with agreed(comm, CheckpointError), explained(what):
        directory = absolute(directory)
        _require_same_directory(directory, name)
        manifest = CheckpointManifest.parse(data, directory)
        _check_wanted(directory, manifest, into or {})
    index = PartIndex(directory, manifest)
    with agreed(comm, CheckpointError), explained(what):
        want = {**_all_of(manifest), **(into or {})}
        old = manifest.world
        likely = {*comm.node_ranks, *(rank * old // comm.size for rank in comm.node_ranks)}
        start_on(comm, index.read_for, want, likely, comm.node).wait()
    with agreed(comm, CheckpointError), explained(what):
        _check_cover(index, want)
        records = index.records()
        pieces = _empty(records, into or {})
        groups = [(records, pieces)]
        privates = {rank: index.private(rank) for rank in comm.node_ranks}
        own = _empty(privates[comm.rank])
        groups += [(of, own if rank == comm.rank else {}) for rank, of in privates.items()]
        # Nodes begin with different files, to spread the load.
        stored = _by_file(groups, first=comm.node_ranks[0] % manifest.world)
    with agreed(comm, CheckpointError), explained(what):
        start_on(comm, block_reader.read, directory, stored, comm.node).wait()
        leaves = {**_tensors(pieces), **{path: pieces[path] for path in into or ()}}
        state = _assembled(directory, manifest.skeleton, leaves)
        mine = {comm.rank: _private_tree(directory, _tensors(own))} if own else {}
    return Loaded(state, Privates(index, mine), manifest.facts, manifest.step)


def read_manifest(directory: Path | str, comm: Communicator) -> CheckpointManifest:
    """Read the manifest of a checkpoint on rank 0, and return it on every rank. Collective.

    Raises ``CheckpointError`` on every rank: the manifest is missing, damaged or hostile, or the
    ranks pass different directories.
    """
    name, data = _manifest_bytes(directory, comm)
    with agreed(comm, CheckpointError):
        _require_same_directory(absolute(directory), name)
        return CheckpointManifest.parse(data, directory)


def _manifest_bytes(directory: Path | str, comm: Communicator) -> tuple[str, bytes]:
    """Return the directory that rank 0 passes, and the bytes of its manifest. Collective."""

    def read() -> tuple[str, bytes]:
        path = absolute(directory)
        return str(path), read_bytes(path)

    return on_root(comm, explained(f"read checkpoint {directory}")(read), CheckpointError)


def _require_same_directory(directory: Path, of_root: str) -> None:
    if str(directory) != of_root:
        raise CheckpointError(
            f"all ranks must load the same checkpoint, but rank 0 loads {of_root}, and this rank "
            f"{directory}; pass the same directory"
        )


def check(directory: Path | str) -> list[str]:
    """Read every file of a checkpoint, and return its faults. Not collective.

    Everything that ``load`` refuses on any number of ranks is a fault.
    """
    directory = Path(directory)
    faults: list[str] = []
    try:
        index = PartIndex(directory, CheckpointManifest.read(directory))
        for file in index.manifest.files:
            try:
                index.read([file.first_rank])
            except CheckpointError as error:
                faults.append(str(error))
        privates = [index.private(rank) for rank in index.listed_ranks()]
    except CheckpointError as error:
        return [str(error)]
    manifest = index.manifest
    stored = _by_file([(records, {}) for records in (index.records(), *privates)])
    checks: list[Callable[[], object]] = [
        partial(_check_file, directory / file_name(file), list(parts))
        for file, parts in groupby(stored, lambda one: one.part.file)
    ]
    if not faults:
        checks.append(partial(_check_cover, index, _all_of(manifest)))
    # A state may be invalid although all files are intact.
    checks.append(
        partial(_assembled, directory, manifest.skeleton, dict.fromkeys(manifest.tensors))
    )
    checks += [partial(_check_private, directory, of) for of in privates]
    for action in checks:
        try:
            with explained(f"read checkpoint {directory}"):
                action()
        except CheckpointError as error:
            faults.append(str(error))
    return list(dict.fromkeys(faults))


class Privates(Mapping[int, Any]):
    """Mapping from each rank of the save to its private values, which are read on demand."""

    def __init__(self, index: PartIndex, of_ranks: dict[int, Any]) -> None:
        self._index = index
        self._read = of_ranks

    def __getitem__(self, rank: int) -> Any:
        """Return the private values of a rank. Not collective.

        Raises ``KeyError``: the save had no such rank, or no private values of the rank.
        ``CheckpointError``: the file of the rank is damaged.
        """
        if rank not in self._read:
            directory = self._index.directory
            if not (records := self._index.private(rank)):
                raise KeyError(rank)
            pieces = _empty(records)
            with explained(f"read checkpoint {directory}"):
                block_reader.read(directory, _by_file([(records, pieces)]), None)
                self._read[rank] = _private_tree(directory, _tensors(pieces))
        return self._read[rank]

    def __iter__(self) -> Iterator[int]:
        return self._index.private_ranks()

    def __len__(self) -> int:
        return self._index.num_private


def _check_cover(index: PartIndex, want: Mapping[str, Shard]) -> None:
    """Raise ``CheckpointError`` if an element of ``want`` is in no part, or in several parts."""
    for path, shard in want.items():
        if fault := index.fault(path, shard):
            raise damaged(index.directory / NAME, fault)


def _private_tree(directory: Path, tensors: Mapping[str, Any]) -> Any:
    """Return the private values of a rank, given its private tensors by name."""
    try:
        skeleton = json.loads(bytes(host_bytes(tensors[PRIVATE])))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {directory} is damaged: the private values of a rank are not JSON: "
            f"{error}; use another checkpoint"
        ) from error
    return _assembled(directory, skeleton, tensors, f"{PRIVATE}/")


def _check_private(directory: Path, records: Mapping[str, Record]) -> None:
    pieces = _empty({PRIVATE: records[PRIVATE]})
    block_reader.read(directory, _by_file([(records, pieces)]), None)
    _private_tree(directory, {**dict.fromkeys(records), **_tensors(pieces)})


def _all_of(manifest: CheckpointManifest) -> dict[str, Shard]:
    return {path: Shard.whole(record.shape) for path, record in manifest.tensors.items()}


def _check_wanted(
    directory: Path, manifest: CheckpointManifest, into: Mapping[str, Shard]
) -> None:
    checked("into", into, Mapping, CheckpointError)
    for path, shard in into.items():
        checked(f"into[{path!r}]", shard, Shard, CheckpointError)
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


def _empty(
    records: Mapping[str, Record], into: Mapping[str, Shard] | None = None
) -> dict[str, TensorPiece]:
    """Allocate a tensor for each record, or only the shard if ``into`` has a shard for it."""
    shards = {name: Shard.whole(record.shape) for name, record in records.items()}
    shards.update(into or {})
    return {
        name: TensorPiece(torch.empty(shard.shape, dtype=DTYPES[records[name].dtype]), shard)
        for name, shard in shards.items()
    }


def _tensors(pieces: Mapping[str, TensorPiece]) -> dict[str, Tensor]:
    return {name: piece.tensor for name, piece in pieces.items()}


def _by_file(
    groups: Iterable[tuple[Mapping[str, Record], Mapping[str, TensorPiece]]], first: int = 0
) -> list[StoredTensor]:
    """Return stored parts and the pieces to fill, ordered by file.

    The files of rank ``first`` and later ranks precede the files of earlier ranks.
    """
    stored = (
        StoredTensor(name, record.dtype, part, pieces.get(name))
        for records, pieces in groups
        for name, record in records.items()
        for part in record.parts
    )
    return sorted(stored, key=lambda one: (one.part.file < first, one.part.file))


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


def _check_file(path: Path, stored: Sequence[StoredTensor]) -> None:
    with opened(path) as file:
        for one in stored:
            entry = one.part.entry(one.name)
            file.check(entry, one.dtype, one.part.shard.shape)
            memory = memoryview(bytearray(min(one.num_bytes, BLOCK_BYTES)))
            for start in range(0, one.num_bytes, BLOCK_BYTES):
                file.read_into(entry, start, memory[: one.num_bytes - start], one.part.crcs)
