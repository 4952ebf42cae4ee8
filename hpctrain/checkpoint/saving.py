"""Writing a checkpoint: every rank writes its share, rank 0 the manifest, then it appears."""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.checkpoint.agreement import attempt, on_root
from hpctrain.checkpoint.atomic_replace import appear
from hpctrain.checkpoint.format import tensor_file
from hpctrain.checkpoint.format.manifest import (
    NAME,
    PRIVATE,
    CheckpointManifest,
    Record,
    StoredPart,
    dumps,
    file_name,
)
from hpctrain.checkpoint.format.shard import Piece, Shard, fault_of_cover
from hpctrain.checkpoint.format.state_tree import flatten, lines
from hpctrain.checkpoint.write_partition import Parts, divide, owners
from hpctrain.comm.agreement import raise_if_any, require_equal
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.core.atomic import PART, make_folder, sync
from hpctrain.core.errors import CheckpointError, MismatchError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


_Written = tuple[str | None, dict[str, list[int]] | None, dict[str, tuple[str, tuple[int, ...]]]]
"""Of one rank: why it could not write, or the checksums; and what it has of its own."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save took."""

    bytes: int
    """Of all tensors, on all ranks."""
    seconds: float


@dataclass(frozen=True, slots=True)
class _Contents:
    leaves: dict[str, Tensor | Piece]
    skeleton: Any
    own: dict[str, Tensor]
    common: list[str]
    """What must be the same on every rank."""
    pieces: dict[str, Shard]

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.common).encode()).hexdigest()


def save(  # noqa: PLR0913 - what belongs to a checkpoint
    directory: Path | str,
    state: Mapping[str, Any],
    comm: "Communicator",
    *,
    step: int,
    private: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    guard: Callable[[], None] | None = None,
) -> Saved:
    """Write a checkpoint, which appears whole and on disk, or not at all.

    Collective. Needs no memory beside the state where its tensors are contiguous.

    Args:
        directory: of this checkpoint; its parents are made. An older one there is replaced.
        state: the same tree of plain values, tensors and pieces on every rank. Tensors are
            replicated, and written once; pieces are written by a rank that has them.
        comm: the ranks that write.
        step: that the state belongs to.
        private: what each rank has of its own, such as random states; kept by rank.
        facts: values for JSON, for people and for checks before a load; rank 0's are kept.
        guard: called on rank 0 before anything is written, and again before it appears, which a
            CheckpointError of it prevents.

    Raises:
        CheckpointError: the state is no state, the ranks disagree, or a disk refuses; on every
            rank, and what was there before is intact.
    """
    began = time.perf_counter()
    directory = Path(directory)
    what = f"write checkpoint {directory}"
    facts = dict(facts or {})
    call = [str(directory), str(step)]
    refusal, contents = attempt(what, lambda: _contents(call, state, private or {}, facts))
    contents = _same(comm, refusal, contents)
    parts = _plan(contents, comm.allgather_object(contents.pieces))
    room = on_root(comm, what, lambda: _make_room(directory, guard))
    written = _write(comm, what, room / file_name(comm.rank), contents, parts)

    def publish() -> int:
        assert written is not None
        manifest = CheckpointManifest(
            step=step,
            world=comm.size,
            facts=facts,
            skeleton=contents.skeleton,
            tensors=_records(contents.leaves, parts, written),
            private={rank: _own_records(rank, answer) for rank, answer in enumerate(written)},
        )
        _publish(manifest, room, directory, guard)
        return manifest.num_bytes

    try:
        num_bytes = on_root(comm, what, publish)
    except CheckpointError:
        if comm.rank == 0:
            shutil.rmtree(room, ignore_errors=True)
        raise
    return Saved(num_bytes, time.perf_counter() - began)


def _contents(
    call: list[str], state: Mapping[str, Any], private: Mapping[str, Any], facts: Mapping[str, Any]
) -> _Contents:
    leaves, skeleton = flatten(state)
    own, own_skeleton = flatten(private)
    common = [*call, *lines(skeleton)]
    tensors: dict[str, Tensor] = {}
    pieces = {}
    for path, leaf in leaves.items():
        tensor = leaf.tensor if isinstance(leaf, Piece) else leaf
        tensor_file.check_storable(path, tensor)
        if isinstance(leaf, Piece):
            pieces[path] = leaf.shard
            common.append(
                f"{path} is a piece of {name_of(tensor.dtype)} {leaf.shard.global_shape}"
            )
        else:
            common.append(f"{path} is {name_of(tensor.dtype)} {list(tensor.shape)}")
    for path, leaf in own.items():
        if isinstance(leaf, Piece):
            raise CheckpointError(
                f"what a rank has of its own is no piece of a tensor, got one at {path}; put it "
                f"into the state"
            )
        tensor_file.check_storable(path, leaf)
        tensors[f"{PRIVATE}/{path}"] = leaf
    try:
        dumps(facts)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the facts of a checkpoint are values for JSON: {error}") from None
    if private:
        text = bytearray(dumps(own_skeleton).encode())
        tensors[PRIVATE] = torch.frombuffer(text, dtype=torch.uint8)
    return _Contents(leaves, skeleton, tensors, common, pieces)


def _same(comm: "Communicator", refusal: str | None, contents: _Contents | None) -> _Contents:
    """Return the contents where all ranks have some, and the same."""
    digest = contents and contents.digest
    told = comm.allgather_object((refusal, digest))
    raise_if_any([message for message, _ in told], CheckpointError)
    assert contents
    if len({digest for _, digest in told}) > 1:
        try:
            require_equal(comm, contents.common, "the state of a checkpoint")
        except MismatchError as error:
            raise CheckpointError(
                f"{str(error).rpartition(';')[0]}; what a rank has of its own goes into private"
            ) from None
    return contents


def _plan(contents: _Contents, pieces: Sequence[Mapping[str, Shard]]) -> dict[str, Parts]:
    whole = {
        path: (tuple(leaf.shape), leaf.itemsize)
        for path, leaf in contents.leaves.items()
        if isinstance(leaf, Tensor)
    }
    sharded = owners(pieces)
    for path, parts in sharded.items():
        shape = pieces[0][path].global_shape
        if fault := fault_of_cover(shape, list(parts.values())):
            raise CheckpointError(
                f"the pieces of all ranks are the whole tensor, each element once: {fault} of "
                f"{path} {list(shape)}; give every rank its piece"
            )
    return {**divide(whole, len(pieces)), **sharded}


def _write(
    comm: "Communicator", what: str, file: Path, contents: _Contents, parts: Mapping[str, Parts]
) -> list[_Written] | None:
    """Write the share of this rank; return on rank 0 what all ranks tell of theirs."""
    share = {**_share(contents.leaves, parts, comm.rank), **contents.own}
    refusal, crcs = attempt(what, lambda: tensor_file.write(file, share))
    own = {
        name: (name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in contents.own.items()
    }
    return comm.gather_object((refusal, crcs, own))


def _share(
    leaves: Mapping[str, Tensor | Piece], parts: Mapping[str, Parts], rank: int
) -> dict[str, Tensor]:
    share = {}
    for path, of_ranks in parts.items():
        if rank in of_ranks:
            leaf = leaves[path]
            if isinstance(leaf, Piece):
                share[path] = leaf.tensor
            else:
                share[path] = leaf.detach()[Shard.whole(leaf.shape).slices(of_ranks[rank])]
    return share


def _records(
    leaves: Mapping[str, Tensor | Piece], parts: Mapping[str, Parts], written: Sequence[_Written]
) -> dict[str, Record]:
    """Describe the state, by what all ranks told of their writing.

    Raises:
        CheckpointError: some rank could not write.
    """
    raise_if_any([refusal for refusal, _, _ in written], CheckpointError)
    crcs = [told or {} for _, told, _ in written]
    records = {}
    for path, of_ranks in parts.items():
        leaf = leaves[path]
        tensor = leaf.tensor if isinstance(leaf, Piece) else leaf
        shape = leaf.shard.global_shape if isinstance(leaf, Piece) else tuple(leaf.shape)
        stored = [
            StoredPart(rank, shard, tuple(crcs[rank][path])) for rank, shard in of_ranks.items()
        ]
        records[path] = Record(name_of(tensor.dtype), shape, tuple(stored))
    return records


def _own_records(rank: int, written: _Written) -> dict[str, Record]:
    _, crcs, own = written
    assert crcs is not None
    return {
        name: Record(dtype, shape, (StoredPart(rank, Shard.whole(shape), tuple(crcs[name])),))
        for name, (dtype, shape) in own.items()
    }


def _make_room(directory: Path, guard: Callable[[], None] | None) -> Path:
    """Return a new folder beside a checkpoint; remove those that were left or are of nobody now.

    Its name is of this save alone: what another job does with its own, late, touches no file here.
    """
    if guard is not None:
        guard()
    with suppress(FileNotFoundError):
        for path in directory.parent.iterdir():
            if path.name.startswith(f"{directory.name}.") and path.suffix == PART:
                shutil.rmtree(path)
    room = directory.with_name(f"{directory.name}.{token_hex(4)}{PART}")
    make_folder(directory.parent)
    room.mkdir()
    return room


def _publish(
    manifest: CheckpointManifest, room: Path, directory: Path, guard: Callable[[], None] | None
) -> None:
    """Write the manifest last, and let the directory appear."""
    with (room / NAME).open("xb") as file:
        file.write(manifest.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    sync(room)
    if guard is not None:
        guard()
    appear(room, directory)
