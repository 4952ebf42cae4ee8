"""Choice of the rank that writes each piece of a sharded tensor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from hpctrain.checkpoint.format.shard import Shard, fault_of_cover
from hpctrain.checkpoint.replicas import MOST_NAMED, difference
from hpctrain.comm.agreement import on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import CheckpointError

_DIGEST_BITS = 42  # the sum over 2^20 ranks is below 2^62


class _Held(NamedTuple):
    """A piece of this rank that has elements."""

    writes: bool  # whether this rank writes the piece
    num_ranks: int  # number of ranks that compare the piece; 1 if it is not compared


@dataclass(kw_only=True, slots=True)
class PiecePlan:
    """Pieces of sharded tensors that this rank writes, and pieces that ranks compare."""

    comm: Communicator
    pieces: Mapping[str, Shard]  # pieces of this rank, by path
    held: dict[str, _Held] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)
    """Paths of the tensors with a piece that several ranks compare; the same on all ranks."""

    @classmethod
    def of(
        cls, comm: Communicator, pieces: Mapping[str, Shard], source_rank: int | None
    ) -> "PiecePlan":
        """Choose one rank to write each piece that one or several ranks hold. Collective.

        Tensors that are divided among the ranks in the same manner have one layout; digests find
        the layouts. For one tensor of each layout, rank 0 receives the pieces of all ranks and
        chooses. The other ranks receive two integers for each rank and layout.

        Args:
            comm: the ranks.
            pieces: pieces of this rank, of the same tensors in the same order on every rank.
            source_rank: rank that writes all its pieces, without a comparison with copies on
                other ranks; None for no such rank.

        Raises:
            CheckpointError: the pieces do not cover each element of a tensor once; on every rank.
        """
        plan = cls(comm=comm, pieces=pieces)
        if not pieces:
            return plan
        layouts = plan._layouts()
        shapes = {path: pieces[path].global_shape for path in layouts}
        boxes = [
            (pieces[path].numel, *pieces[path].offset, *pieces[path].shape) for path in shapes
        ]
        of_ranks = comm.gather_object(np.fromiter(chain(*boxes), np.int64))

        def choose() -> "np.ndarray[Any, Any]":
            assert of_ranks is not None
            return _choose(shapes, np.stack(of_ranks), source_rank)

        chosen = on_root(comm, choose, CheckpointError)
        numbers = {path: number for number, path in enumerate(pieces)}
        is_shared = chosen[..., 1].max(axis=0) > 1
        for column, paths in enumerate(layouts.values()):
            turn, num_ranks = chosen[comm.rank, column].tolist()
            if num_ranks:
                for path in paths:
                    plan.held[path] = _Held(numbers[path] % num_ranks == turn, num_ranks)
            plan.shared += paths if is_shared[column] else []
        return plan

    @property
    def written(self) -> list[str]:
        """Paths of the pieces that this rank writes, in the order of the pieces."""
        return [path for path in self.pieces if path in self.held and self.held[path].writes]

    @property
    def compared(self) -> list[str]:
        """Paths of the pieces of this rank that other ranks compare too."""
        return [path for path, held in self.held.items() if held.num_ranks > 1]

    def require_same(self, checksums: Mapping[str, int]) -> None:
        """Compare the checksums of the pieces in ``compared``. Collective.

        Raises:
            CheckpointError: copies differ; the error names pieces and ranks, on every rank.
        """
        terms = dict.fromkeys(self.shared, (0, 0))
        for path, checksum in checksums.items():
            # The terms of the ranks that hold a piece add up to zero if its copies are equal.
            factor = 1 - self.held[path].num_ranks if self.held[path].writes else 1
            first, second = _digest(f"{self.pieces[path].offset} {checksum}")
            terms[path] = factor * first, factor * second
        sums = self._sums(terms)
        differ = [path for path, of_path in sums.items() if any(of_path)]
        if not differ:
            return
        named = differ[:MOST_NAMED]
        of_ranks = self.comm.gather_object(
            [(self.pieces[path].offset, checksums.get(path)) for path in named]
        )

        def describe() -> None:
            assert of_ranks is not None
            found: dict[str, dict[int, int]] = {}
            for path, column in zip(named, zip(*of_ranks, strict=True), strict=True):
                for rank, (offset, checksum) in enumerate(column):
                    if checksum is not None:
                        found.setdefault(f"{path} at {list(offset)}", {})[rank] = checksum
            differing = {name: one for name, one in found.items() if len({*one.values()}) > 1}
            raise difference(differing, len(self.shared), len(differ))

        on_root(self.comm, describe, CheckpointError)

    def _layouts(self) -> dict[str, list[str]]:
        """Return groups of tensors with one layout: all paths by the first path. Collective.

        Two tensors have one layout if every rank holds the same part of both.
        """
        rank = self.comm.rank
        terms = {
            path: _digest(f"{rank} {shard if shard.numel else shard.global_shape}")
            for path, shard in self.pieces.items()
        }
        found: dict[tuple[int, ...], list[str]] = {}
        for path, digest in self._sums(terms).items():
            found.setdefault(digest, []).append(path)
        return {paths[0]: paths for paths in found.values()}

    def _sums(self, terms: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
        """Return the sums of ``terms`` over all ranks. Collective, one all-reduce."""
        if not terms:
            return {}
        sums = torch.tensor([*terms.values()], dtype=torch.int64)
        self.comm.allreduce_(sums).wait()
        return {path: tuple(of_path) for path, of_path in zip(terms, sums.tolist(), strict=True)}


def _digest(text: str) -> tuple[int, int]:
    number = int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")
    return number % (1 << _DIGEST_BITS), (number >> 64) % (1 << _DIGEST_BITS)


def _choose(
    shapes: Mapping[str, tuple[int, ...]],
    boxes: "np.ndarray[Any, Any]",
    source_rank: int | None,
) -> "np.ndarray[Any, Any]":
    """Return the turn and the number of turns of each rank, as an array [ranks, layouts, 2].

    ``shapes`` has one tensor of each layout. In a layout, the ranks that hold a piece write it
    alternately: if the number of turns is n, the rank of turn t writes the tensors whose index
    modulo n is t. Ranks without elements, and ranks whose piece ``source_rank`` writes, have 0, 0.
    """
    chosen = np.zeros((len(boxes), len(shapes), 2), np.int32)
    columns = np.cumsum([1 + 2 * len(shape) for shape in shapes.values()])[:-1]
    for number, ((path, shape), held) in enumerate(
        zip(shapes.items(), np.split(boxes, columns, axis=1), strict=True)
    ):
        parts = []
        for place, (shard, ranks) in enumerate(_holders(shape, held)):
            parts.append(shard)
            if source_rank in ranks:
                chosen[source_rank, number] = 0, 1
                continue
            turns = (np.arange(len(ranks)) - place) % len(ranks)
            chosen[ranks, number] = np.stack([turns, np.full(len(ranks), len(ranks))], axis=1)
        if fault := fault_of_cover(shape, parts):
            raise CheckpointError(
                f"the pieces of a tensor on all ranks must contain each element once, but "
                f"for {path} {list(shape)} {fault}; pass the correct piece on every rank"
            )
    return chosen


def _holders(
    shape: tuple[int, ...], boxes: "np.ndarray[Any, Any]"
) -> Iterator[tuple[Shard, list[int]]]:
    """Yield each piece of a tensor that has elements, and the ranks that hold the piece."""
    distinct, inverse, counts = np.unique(boxes, axis=0, return_inverse=True, return_counts=True)
    ranks = np.argsort(inverse.reshape(-1), kind="stable")
    groups = np.split(ranks, np.cumsum(counts)[:-1])
    for (numel, *box), group in zip(distinct.tolist(), groups, strict=True):
        if numel:
            yield Shard(shape, box[: len(shape)], box[len(shape) :]), group.tolist()
