"""Write a checkpoint: all ranks write their shares, then rank 0 writes the manifest."""

import math
import os
import shutil
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.checkpoint_config import Files
from hpctrain.checkpoint.file_share import FileShare
from hpctrain.checkpoint.format import tensor_file
from hpctrain.checkpoint.format.manifest import (
    NAME,
    PRIVATE,
    CheckpointManifest,
    FileRecord,
    Record,
    dumps,
    require_named,
)
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.checkpoint.format.state_hash import crc_of
from hpctrain.checkpoint.format.state_tree import flatten, lines
from hpctrain.checkpoint.piece_plan import PiecePlan
from hpctrain.checkpoint.refusal import explained, mismatches
from hpctrain.checkpoint.replicas import Checksum, checksums, require_same
from hpctrain.comm.agreement import agreed, on_root, require_equal
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.ops import Op
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.core.atomic import PART, appear, discard, make_folder, sync
from hpctrain.core.checks import checked
from hpctrain.core.errors import CheckpointError
from hpctrain.core.paths import absolute
from hpctrain.core.units import MIB

_Spec = tuple[str, tuple[int, ...]]  # dtype and shape of a whole tensor

_REMEDY = (
    "add the keys of each dict in the same order on every rank, and pass values that differ "
    "between ranks as private"
)

WHOLE_BYTES = MIB  # smaller tensors are not divided

Parts = dict[int, Shard]  # by rank: the part of one tensor that the rank writes


@dataclass(frozen=True, slots=True)
class Saved:
    """Size and duration of a save."""

    bytes: int  # bytes of all tensors, on all ranks
    seconds: float
    compare_s: float  # part of ``seconds``: comparison of the state with other ranks


@dataclass(frozen=True, slots=True)
class SaveSource:
    """Input of a save: the state or a copy of it, private values, and checksums."""

    state: Any
    private: Any
    checksums: Mapping[str, Checksum]  # checksums of the replicated tensors
    compare_s: float  # seconds that the checksums took

    @classmethod
    def of(
        cls, state: Any, private: Any, comm: Communicator, source_rank: int | None
    ) -> "SaveSource":
        """Return a source that refers to the state without a copy. Not collective."""
        began = time.perf_counter()
        found = {}
        if comm.size > 1 and source_rank is None:
            found = checksums(flatten(state)[0])
        return cls(state, private, found, time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class _Contents:
    leaves: dict[str, Tensor | TensorPiece]
    skeleton: Any
    own: dict[str, Tensor]
    common: list[str]  # lines that must be identical on every rank

    @property
    def pieces(self) -> dict[str, Shard]:
        """Pieces of sharded tensors on this rank."""
        return {
            path: leaf.shard for path, leaf in self.leaves.items() if isinstance(leaf, TensorPiece)
        }

    def piece(self, path: str) -> Tensor:
        """Return the elements of this rank's piece of a sharded tensor."""
        leaf = self.leaves[path]
        assert isinstance(leaf, TensorPiece)
        return leaf.tensor


def save(  # noqa: PLR0913 - all parts of a checkpoint
    directory: Path | str,
    state: Mapping[str, Any],
    comm: Communicator,
    *,
    step: int,
    private: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    guard: Callable[[], None] | None = None,
    source_rank: int | None = None,
    files: Files = "node",
) -> Saved:
    """Write a checkpoint to disk atomically: a failed save leaves ``directory`` unchanged.

    Collective. Needs no additional memory if the tensors of the state are contiguous.

    Args:
        directory: directory of this checkpoint; missing parents are created. An older checkpoint
            in ``directory`` is replaced.
        state: the same tree of plain values, tensors and pieces on every rank, with the same
            bits: checksums are compared before the checkpoint is published. The ranks divide the
            tensors, so that each tensor is written once. A piece that several ranks hold is
            written by one of them.
        comm: the ranks that write.
        step: step of the state.
        private: values of each rank, such as random states; stored by rank.
        facts: values to store as JSON, such as those to check before a load; the values of rank 0
            are stored.
        guard: called on rank 0 before any file is written, and again before the checkpoint
            is published. A CheckpointError that it raises cancels the save.
        source_rank: write the plain values and tensors of this rank only. If this
            rank and other ranks hold the same piece, the copy of ``source_rank`` is written. The
            other ranks write all other pieces.
        files: ``"node"`` for one file per node, ``"rank"`` for one per rank. Ranks without node
            memory write one file each.

    Raises:
        CheckpointError: a value of the state is not supported, the ranks disagree or hold
            different tensors, the directory has the name of another step, or a file cannot be
            written; on every rank, and an older checkpoint is intact.
    """
    take = partial(SaveSource.of, state, private or {}, comm, source_rank)
    options = SaveOptions(
        step=step, facts=facts or {}, guard=guard, source_rank=source_rank, files=files
    )
    return write(directory, take, comm, options)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """Arguments of ``save`` other than directory, state and communicator."""

    step: int
    facts: Mapping[str, Any]
    guard: Callable[[], None] | None
    source_rank: int | None
    files: str

    def check(self, num_ranks: int) -> None:
        """Raise ``CheckpointError`` unless all values are valid."""
        check_source(self.source_rank, num_ranks)
        checked("files", self.files, Files, CheckpointError)
        checked("facts", self.facts, Mapping, CheckpointError)

    def lines(self) -> list[str]:
        """Return a line for each argument that must be the same on every rank."""
        return [f"{name} {getattr(self, name)}" for name in ("step", "source_rank", "files")]


def write(
    directory: Path | str,
    take: Callable[[], SaveSource],
    comm: Communicator,
    options: SaveOptions,
) -> Saved:
    """Write a checkpoint of the state that ``take`` returns; see ``save``. Collective."""
    began = time.perf_counter()
    what = f"write checkpoint {directory}"
    step, guard, source_rank = options.step, options.guard, options.source_rank
    with agreed(comm, CheckpointError), explained(what):
        directory = absolute(directory)
        require_named(directory, step)
        options.check(comm.size)
        source = take()
        contents = _contents(source, options.facts, is_compared=source_rank is None)
    with mismatches():
        lines = [f"directory {directory}", *options.lines(), *contents.common]
        require_equal(comm, lines, "the state of a checkpoint", _REMEDY)
    tree = contents.skeleton, {path: _spec(leaf) for path, leaf in contents.leaves.items()}
    if source_rank is not None:
        tree = comm.broadcast_object(tree, root=source_rank)
    pieces = PiecePlan.of(comm, contents.pieces, source_rank)
    parts = _parts(tree[1], contents.pieces, comm.size, source_rank)
    room = on_root(comm, explained(what)(partial(_make_room, directory, guard)), CheckpointError)
    try:
        share, shards = _share(contents, parts, pieces.written, comm.rank)
        file = FileShare.of(comm, options.files, share, shards)
        with agreed(comm, CheckpointError), explained(what):
            crcs = file.write(room)
            written = time.perf_counter()
            copies = {path: crc_of(contents.piece(path)) for path in pieces.compared}
            compare_s = source.compare_s + time.perf_counter() - written
        record, exchanged = file.finish(room, crcs), time.perf_counter()
        require_same(comm, {path: one.value for path, one in source.checksums.items()})
        pieces.require_same(copies)
        compare_s += time.perf_counter() - exchanged
        places = _places(comm, tree[1], share, file.ranks[0])
        make = partial(_manifest, tree, places, comm.gather_object(record), options)
        publish = partial(_publish, make, room, directory, guard)
        num_bytes = on_root(comm, explained(what)(publish), CheckpointError)
    except CheckpointError:
        if comm.rank == 0:
            shutil.rmtree(room, ignore_errors=True)
        raise
    return Saved(num_bytes, time.perf_counter() - began, compare_s)


def check_source(source_rank: int | None, num_ranks: int) -> None:
    """Raise ``CheckpointError`` unless ``source_rank`` is None or a rank."""
    checked("source_rank", source_rank, int | None, CheckpointError)
    if source_rank is not None and not 0 <= source_rank < num_ranks:
        raise CheckpointError(
            f"source_rank must be a rank from 0 to {num_ranks - 1}, got {source_rank}"
        )


def _contents(source: SaveSource, facts: Mapping[str, Any], *, is_compared: bool) -> _Contents:
    leaves, skeleton = flatten(source.state)
    checked("private", source.private, Mapping, CheckpointError)
    common = []
    for path, leaf in leaves.items():
        is_piece = isinstance(leaf, TensorPiece)
        tensor_file.check_storable(path, leaf.tensor if isinstance(leaf, TensorPiece) else leaf)
        dtype, shape = _spec(leaf)
        if is_piece or is_compared:
            common.append(f"{path} is {'a piece of ' * is_piece}{dtype} {list(shape)}")
        if (checksum := source.checksums.get(path)) and checksum.device != "cpu":
            common[-1] += f" on {checksum.device}"
    common += lines(source.state) if is_compared else []
    own: dict[str, Tensor] = {}
    leaves_of_own, own_skeleton = flatten(source.private)
    for path, leaf in leaves_of_own.items():
        if isinstance(leaf, TensorPiece):
            raise CheckpointError(
                f"private values must not contain a TensorPiece, got one at {path}; put it into "
                f"the state"
            )
        tensor_file.check_storable(path, leaf)
        own[f"{PRIVATE}/{path}"] = leaf
    try:
        dumps(facts)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the facts of a checkpoint must be values of JSON, but {error}; convert them"
        ) from None
    if source.private:
        text = bytearray(dumps(own_skeleton).encode())
        own[PRIVATE] = torch.frombuffer(text, dtype=torch.uint8)
    return _Contents(leaves, skeleton, own, common)


def _spec(leaf: Tensor | TensorPiece) -> _Spec:
    if isinstance(leaf, TensorPiece):
        return name_of(leaf.tensor.dtype), leaf.shard.global_shape
    return name_of(leaf.dtype), tuple(leaf.shape)


def _parts(
    specs: Mapping[str, _Spec],
    pieces: Mapping[str, Shard],
    num_ranks: int,
    source_rank: int | None,
) -> dict[str, Parts]:
    whole = {path: spec for path, spec in specs.items() if path not in pieces}
    return divide(whole, num_ranks, source_rank)


def divided(
    leaves: Mapping[str, Tensor | TensorPiece], num_ranks: int, source_rank: int | None
) -> dict[str, Parts]:
    """Return, for each replicated tensor, the part that each rank writes."""
    whole = {path: _spec(leaf) for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    return divide(whole, num_ranks, source_rank)


def divide(
    tensors: Mapping[str, _Spec], num_ranks: int, source_rank: int | None = None
) -> dict[str, Parts]:
    """Split tensors over the ranks so that each writes about the same number of bytes.

    The bytes of all tensors, in their order, are cut into equal parts. A cut inside a large tensor
    moves to the nearest row; a small tensor is written by the rank that would write most of it.
    Rows are slices of the first dimension that is larger than 1.

    ``tensors`` contains dtype and shape by path. ``source_rank``, if given, writes all tensors.
    """
    if source_rank is not None:
        return {path: {source_rank: Shard.whole(shape)} for path, (_, shape) in tensors.items()}
    sizes = {
        path: math.prod(shape) * getattr(torch, dtype).itemsize
        for path, (dtype, shape) in tensors.items()
    }
    cuts = [sum(sizes.values()) * rank // num_ranks for rank in range(num_ranks + 1)]
    divided, start = {}, 0
    for path, num_bytes in sizes.items():
        first, last = 0, 1  # an empty tensor is written by rank 0
        if num_bytes:
            first = bisect_right(cuts, start) - 1
            last = bisect_left(cuts, start + num_bytes, lo=first + 1)
        around = [min(max(cut - start, 0), num_bytes) for cut in cuts[first : last + 1]]
        divided[path] = _cut(tensors[path][1], num_bytes, around, first)
        start += num_bytes
    return divided


def _cut(shape: tuple[int, ...], num_bytes: int, cuts: Sequence[int], first_rank: int) -> Parts:
    shares = [stop - start for start, stop in pairwise(cuts)]
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    if num_bytes < WHOLE_BYTES or dim is None:
        return {first_rank + shares.index(max(shares)): Shard.whole(shape)}
    row_bytes = num_bytes // shape[dim]
    rows = [round(cut / row_bytes) for cut in cuts]
    parts = {}
    for rank, (first, last) in enumerate(pairwise(rows), first_rank):
        if first < last:
            offset = tuple(first if at == dim else 0 for at in range(len(shape)))
            size = (*shape[:dim], last - first, *shape[dim + 1 :])
            parts[rank] = Shard(shape, offset, size)
    return parts


def _share(
    contents: _Contents, parts: Mapping[str, Parts], written: Iterable[str], rank: int
) -> tuple[dict[str, Tensor], dict[str, Shard]]:
    """Return the tensors that a rank writes, by name, and the shards of those that are parts."""
    share = {path: contents.piece(path) for path in written}
    shards = contents.pieces
    for path, of_ranks in parts.items():
        if rank in of_ranks and isinstance(leaf := contents.leaves[path], Tensor):
            shards[path] = of_ranks[rank]
            share[path] = leaf.detach()[Shard.whole(leaf.shape).slices(shards[path])]
    return {**share, **contents.own}, shards


def _places(
    comm: Communicator, specs: Iterable[str], share: Mapping[str, Tensor], file: int
) -> list[tuple[int, int]]:
    """Return for each tensor the first and the last file that contain parts. Collective.

    ``file`` and the results are first ranks of files. Costs one all-reduce, whose size does not
    depend on the number of ranks.
    """
    none = -comm.size, 0
    ends = [(-file, file) if path in share else none for path in specs]
    largest = torch.tensor(ends, dtype=torch.int64).reshape(-1, 2)
    comm.allreduce_(largest, op=Op.MAX).wait()
    return [(-low % comm.size, high) for low, high in largest.tolist()]


def _manifest(
    tree: tuple[Any, Mapping[str, _Spec]],
    places: Sequence[tuple[int, int]],
    records: Sequence[FileRecord | None] | None,
    options: SaveOptions,
) -> CheckpointManifest:
    """Return the manifest of the files that all ranks have written. Called on rank 0 only."""
    assert records is not None
    skeleton, specs = tree
    return CheckpointManifest(
        step=options.step,
        world=len(records),
        facts=dict(options.facts),
        skeleton=skeleton,
        files=tuple(record for record in records if record is not None),
        tensors={
            path: Record(*spec, files=ends)
            for (path, spec), ends in zip(specs.items(), places, strict=True)
        },
    )


def _make_room(directory: Path, guard: Callable[[], None] | None) -> Path:
    """Create a temporary folder next to ``directory``; remove folders of killed saves.

    The name is random, so that the files of a concurrent job are separate.
    """
    if guard is not None:
        guard()
    with suppress(FileNotFoundError):
        for path in directory.parent.iterdir():
            if path.name.startswith(f"{directory.name}.") and path.suffix == PART:
                discard(path)
    room = directory.with_name(f"{directory.name}.{token_hex(4)}{PART}")
    make_folder(directory.parent)
    room.mkdir()
    return room


def _publish(
    make: Callable[[], CheckpointManifest],
    room: Path,
    directory: Path,
    guard: Callable[[], None] | None,
) -> int:
    """Write the manifest, rename ``room`` to ``directory``; return the number of tensor bytes."""
    manifest = make()
    with (room / NAME).open("xb") as file:
        file.write(manifest.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    sync(room)
    if guard is not None:
        guard()
    appear(room, directory)
    return manifest.state_bytes + manifest.private_bytes
