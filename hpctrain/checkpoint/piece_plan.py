"""Choice of the rank that writes each piece of a sharded tensor."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from hpctrain.checkpoint.format.shard import Shard, fault_of_cover
from hpctrain.checkpoint.replicas import difference
from hpctrain.comm.agreement import on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import CheckpointError


class _Shared(NamedTuple):
    """A piece that several ranks hold."""

    path: str
    offset: tuple[int, ...]
    ranks: list[int]


@dataclass(kw_only=True, slots=True)
class PiecePlan:
    """Pieces of sharded tensors that this rank writes, and pieces that ranks compare."""

    written: Collection[str] = ()  # paths of the pieces that this rank writes
    compared: Collection[str] = ()  # paths of the pieces that this rank and others hold
    parts: dict[str, dict[int, Shard]] = field(default_factory=dict)
    """Piece of each path that each rank writes; on rank 0 only."""
    shared: list[_Shared] = field(default_factory=list)
    """Pieces to compare; on rank 0 only."""

    @classmethod
    def of(
        cls, comm: Communicator, pieces: Mapping[str, Shard], source_rank: int | None
    ) -> "PiecePlan":
        """Choose the rank that writes each piece; copies are written once. Collective.

        Rank 0 receives the pieces of all ranks and chooses; the other ranks receive two bits for
        each piece of each rank.

        Args:
            comm: the ranks.
            pieces: pieces of this rank, of the same tensors in the same order on every rank.
            source_rank: writes all its pieces, which are not compared with copies.

        Raises:
            CheckpointError: the pieces do not cover each element of a tensor once; on every rank.
        """
        plan = cls()
        if not pieces:
            return plan
        boxes = [(shard.numel, *shard.offset, *shard.shape) for shard in pieces.values()]
        of_ranks = comm.gather_object(np.fromiter(chain(*boxes), np.int64))
        shapes = {path: shard.global_shape for path, shard in pieces.items()}

        def choose() -> "np.ndarray[Any, Any]":
            assert of_ranks is not None
            return plan._choose(shapes, np.stack(of_ranks), source_rank)

        mine = np.unpackbits(on_root(comm, choose, CheckpointError)[comm.rank], axis=1)
        plan.written, plan.compared = (
            [path for path, bit in zip(pieces, bits, strict=False) if bit] for bits in mine
        )
        return plan

    def _choose(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        boxes: "np.ndarray[Any, Any]",
        source_rank: int | None,
    ) -> "np.ndarray[Any, Any]":
        """Fill ``parts`` and ``shared``; return the bits of each rank. Called on rank 0."""
        bits = np.zeros((len(boxes), 2, len(shapes)), bool)
        columns = np.cumsum([1 + 2 * len(shape) for shape in shapes.values()])[:-1]
        for number, (path, held) in enumerate(
            zip(shapes, np.split(boxes, columns, axis=1), strict=True)
        ):
            parts = self.parts[path] = {}
            for place, (shard, ranks) in enumerate(_holders(shapes[path], held)):
                is_of_source = source_rank in ranks
                owner = source_rank if is_of_source else ranks[(number + place) % len(ranks)]
                assert owner is not None
                parts[owner] = shard
                bits[owner, 0, number] = True
                if len(ranks) > 1 and not is_of_source:
                    self.shared.append(_Shared(path, shard.offset, ranks))
                    bits[ranks, 1, number] = True
            if fault := fault_of_cover(shapes[path], list(parts.values())):
                raise CheckpointError(
                    f"the pieces of a tensor on all ranks must contain each element once, but "
                    f"{fault} of {path} {list(shapes[path])}; pass the correct piece on every rank"
                )
        return np.packbits(bits, axis=2)

    def require_same(self, of_ranks: Sequence[Mapping[str, int]]) -> None:
        """Compare the checksums of the pieces in ``compared`` of all ranks. Called on rank 0.

        Raises ``CheckpointError`` with the pieces and ranks that differ.
        """
        found = {
            f"{path} at {list(offset)}": {rank: of_ranks[rank][path] for rank in ranks}
            for path, offset, ranks in self.shared
        }
        differ = {name: values for name, values in found.items() if len({*values.values()}) > 1}
        if differ:
            raise difference(differ, len(found))


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
