"""Write a checkpoint: all ranks write their shares, then rank 0 writes the manifest."""

import math
import os
import shutil
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.format import tensor_file
from hpctrain.checkpoint.format.manifest import (
    NAME,
    PRIVATE,
    CheckpointManifest,
    Record,
    StoredPart,
    dumps,
    file_name,
    require_named,
)
from hpctrain.checkpoint.format.shard import Shard, TensorPiece, fault_of_cover
from hpctrain.checkpoint.format.state_hash import crc_of
from hpctrain.checkpoint.format.state_tree import flatten, lines
from hpctrain.checkpoint.refusal import explained, mismatches
from hpctrain.checkpoint.replicas import Checksum, checksums, require_same
from hpctrain.comm.agreement import agreed, on_root, require_equal
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.core.atomic import PART, appear, make_folder, sync
from hpctrain.core.errors import CheckpointError
from hpctrain.core.paths import absolute
from hpctrain.core.units import MIB

_Spec = tuple[str, tuple[int, ...]]  # dtype and shape of a whole tensor

_Written = tuple[dict[str, list[int]], dict[str, _Spec]]
"""Checksums of the tensors that a rank wrote, and the specs of its private tensors."""

WHOLE_BYTES = MIB  # smaller tensors are not divided

Parts = dict[int, Shard]  # part of one tensor that each rank writes


@dataclass(frozen=True, slots=True)
class Saved:
    """Size and duration of a save."""

    bytes: int  # bytes of all tensors, on all ranks
    seconds: float
    compare_s: float  # part of ``seconds``: comparison of the state with other ranks


@dataclass(frozen=True, slots=True)
class SaveSource:
    """Argument of ``write``: state or its copy, private values, and checksums."""

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
) -> Saved:
    """Write a checkpoint to disk atomically: a failed save leaves ``directory`` unchanged.

    Collective. Needs no further memory if the tensors of the state are contiguous.

    Args:
        directory: directory of this checkpoint; missing parents are created. An older checkpoint
            in ``directory`` is replaced.
        state: the same tree of plain values, tensors and pieces on every rank, with the same
            bits: checksums are compared before the checkpoint is published. Tensors are written
            once, each rank writes a part of them; pieces are written by a rank that has them.
        comm: the ranks that write.
        step: step of the state.
        private: values of each rank, such as random states; stored by rank.
        facts: values for JSON, for example for checks before a load; the values of rank 0 are
            stored.
        guard: called on rank 0 before any file is written, and again before the checkpoint
            is published. A CheckpointError that it raises cancels the save.
        source_rank: write the plain values and tensors of this rank only. If this
            rank and other ranks hold the same piece, the copy of ``source_rank`` is written. The
            other ranks write all other pieces.

    Raises:
        CheckpointError: a value of the state is not supported, the ranks disagree or hold
            different tensors, the directory has the name of another step, or a file cannot be
            written; on every rank, and an older checkpoint is intact.
    """
    take = partial(SaveSource.of, state, private or {}, comm, source_rank)
    options = SaveOptions(step=step, facts=dict(facts or {}), guard=guard, source_rank=source_rank)
    return write(directory, take, comm, options)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """Arguments of ``save`` other than directory, state and communicator."""

    step: int
    facts: dict[str, Any]
    guard: Callable[[], None] | None
    source_rank: int | None


def write(
    directory: Path | str,
    take: Callable[[], SaveSource],
    comm: Communicator,
    options: SaveOptions,
) -> Saved:
    """Write a checkpoint of the source that ``take`` returns; see ``save``. Collective."""
    began = time.perf_counter()
    what = f"write checkpoint {directory}"
    step, facts, guard = options.step, options.facts, options.guard
    source_rank = options.source_rank
    with agreed(comm, CheckpointError), explained(what):
        directory = absolute(directory)
        require_named(directory, step)
        check_source(source_rank, comm.size)
        source = take()
        contents = _contents(source, facts, is_compared=source_rank is None)
    call = [f"directory {directory}", f"step {step}", f"source_rank {source_rank}"]
    remedy = "pass values that differ between ranks as private"
    with mismatches():
        require_equal(comm, call + contents.common, "the state of a checkpoint", remedy)
    tree = contents.skeleton, {path: _spec(leaf) for path, leaf in contents.leaves.items()}
    if source_rank is not None:
        tree = comm.broadcast_object(tree, root=source_rank)
    pieces = comm.allgather_object(contents.pieces)
    parts = _plan(tree[1], pieces, source_rank)
    room = on_root(comm, explained(what)(partial(_make_room, directory, guard)), CheckpointError)
    try:
        with agreed(comm, CheckpointError), explained(what):
            share = {**_share(contents.leaves, parts, comm.rank), **contents.own}
            crcs = tensor_file.write(room / file_name(comm.rank), share)
            written = time.perf_counter()
            found = {path: checksum.value for path, checksum in source.checksums.items()}
            of_copies = _of_copies(contents.leaves, pieces, source_rank)
            compare_s = source.compare_s + time.perf_counter() - written
        exchanged = time.perf_counter()
        require_same(comm, {**found, **of_copies})
        compare_s += time.perf_counter() - exchanged
        own = crcs, {name: _spec(tensor) for name, tensor in contents.own.items()}
        make = partial(_manifest, tree, parts, comm.gather_object(own), step, facts)
        publish = partial(_publish, make, room, directory, guard)
        num_bytes = on_root(comm, explained(what)(publish), CheckpointError)
    except CheckpointError:
        if comm.rank == 0:
            shutil.rmtree(room, ignore_errors=True)
        raise
    return Saved(num_bytes, time.perf_counter() - began, compare_s)


def check_source(source_rank: int | None, num_ranks: int) -> None:
    """Raise ``CheckpointError`` unless ``source_rank`` is None or a rank."""
    if source_rank is not None and not 0 <= source_rank < num_ranks:
        raise CheckpointError(
            f"source_rank must be a rank from 0 to {num_ranks - 1}, got {source_rank}"
        )


def _contents(source: SaveSource, facts: Mapping[str, Any], *, is_compared: bool) -> _Contents:
    leaves, skeleton = flatten(source.state)
    common = lines(source.state) if is_compared else []
    for path, leaf in leaves.items():
        is_piece = isinstance(leaf, TensorPiece)
        tensor_file.check_storable(path, leaf.tensor if isinstance(leaf, TensorPiece) else leaf)
        dtype, shape = _spec(leaf)
        if is_piece or is_compared:
            common.append(f"{path} is {'a piece of ' * is_piece}{dtype} {list(shape)}")
        if (checksum := source.checksums.get(path)) and checksum.device != "cpu":
            common[-1] += f" on {checksum.device}"
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


def _plan(
    specs: Mapping[str, _Spec], pieces: Sequence[Mapping[str, Shard]], source_rank: int | None
) -> dict[str, Parts]:
    whole = {path: spec for path, spec in specs.items() if path not in pieces[0]}
    sharded = owners(pieces, source_rank)
    for path, parts in sharded.items():
        shape = pieces[0][path].global_shape
        if fault := fault_of_cover(shape, list(parts.values())):
            raise CheckpointError(
                f"the pieces of a tensor on all ranks must contain each element once, but "
                f"{fault} of {path} {list(shape)}; pass the correct piece on every rank"
            )
    return {**divide(whole, len(pieces), source_rank), **sharded}


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
    moves to the next row, a cut inside a small tensor to its end.

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


def owners(
    pieces: Sequence[Mapping[str, Shard]], source_rank: int | None = None
) -> dict[str, Parts]:
    """Choose the rank that writes each piece of sharded tensors; copies are written once."""
    chosen: dict[str, Parts] = {}
    for number, ((path, shard), ranks) in enumerate(_holders(pieces).items()):
        parts = chosen.setdefault(path, {})
        if shard.numel or not shard.global_shape:
            parts[source_rank if source_rank in ranks else ranks[number % len(ranks)]] = shard
    return chosen


def _holders(pieces: Sequence[Mapping[str, Shard]]) -> dict[tuple[str, Shard], list[int]]:
    holders: dict[tuple[str, Shard], list[int]] = {}
    for rank, held in enumerate(pieces):
        for path, shard in held.items():
            holders.setdefault((path, shard), []).append(rank)
    return holders


def _of_copies(
    leaves: Mapping[str, Tensor | TensorPiece],
    pieces: Sequence[Mapping[str, Shard]],
    source_rank: int | None,
) -> dict[str, int | None]:
    """Return the crc32 of each piece that several ranks hold; None if not on this rank."""
    found: dict[str, int | None] = {}
    for (path, shard), ranks in _holders(pieces).items():
        if len(ranks) > 1 and shard.numel and source_rank not in ranks:
            name, leaf = f"{path} at {list(shard.offset)}", leaves[path]
            found[name] = None
            if isinstance(leaf, TensorPiece) and leaf.shard == shard:
                found[name] = crc_of(leaf.tensor)
    return found


def _share(
    leaves: Mapping[str, Tensor | TensorPiece], parts: Mapping[str, Parts], rank: int
) -> dict[str, Tensor]:
    share = {}
    for path, of_ranks in parts.items():
        if rank in of_ranks:
            leaf = leaves[path]
            if isinstance(leaf, TensorPiece):
                share[path] = leaf.tensor
            else:
                share[path] = leaf.detach()[Shard.whole(leaf.shape).slices(of_ranks[rank])]
    return share


def _manifest(
    tree: tuple[Any, Mapping[str, _Spec]],
    parts: Mapping[str, Parts],
    written: Sequence[_Written] | None,
    step: int,
    facts: dict[str, Any],
) -> CheckpointManifest:
    """Return the manifest of the files that all ranks have written. Called on rank 0 only."""
    assert written is not None
    skeleton, specs = tree
    crcs = [of_rank for of_rank, _ in written]

    def record(name: str, spec: _Spec, of_ranks: Parts) -> Record:
        stored = (
            StoredPart(rank, part, tuple(crcs[rank][name])) for rank, part in of_ranks.items()
        )
        return Record(*spec, tuple(stored))

    return CheckpointManifest(
        step=step,
        world=len(written),
        facts=facts,
        skeleton=skeleton,
        tensors={path: record(path, specs[path], of_ranks) for path, of_ranks in parts.items()},
        private={
            rank: {
                name: record(name, spec, {rank: Shard.whole(spec[1])})
                for name, spec in own.items()
            }
            for rank, (_, own) in enumerate(written)
            if own
        },
    )


def _make_room(directory: Path, guard: Callable[[], None] | None) -> Path:
    """Create a folder next to a checkpoint for its files; remove folders of killed saves.

    The name is random, so that the files of a concurrent job are separate.
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
    return manifest.num_bytes
