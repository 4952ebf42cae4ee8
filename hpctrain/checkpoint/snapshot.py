"""A copy of a state in memory that is used again: all that the training thread pays for a save."""

from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.format.shard import Piece, Shard
from hpctrain.checkpoint.format.state_tree import flatten, unflatten
from hpctrain.checkpoint.write_partition import divide


class Snapshot:
    """Holds one copy at a time; the memory of the first serves all later ones of equal shapes.

    Of replicated tensors a rank copies what it will write, so the ranks share time and memory.
    Memory: its share of the state, from the first copy on.
    """

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        """Take the ranks that write together what is replicated."""
        self._rank = rank
        self._num_ranks = num_ranks
        self._copies: dict[str, Tensor] = {}
        self.num_bytes = 0
        """Copied by the last ``take``."""

    def take(self, state: Any) -> Any:
        """Return a copy of a state, on the CPU; what the one before returned is overwritten.

        What another rank writes has its shape and dtype in the copy, but not its values.

        Args:
            state: tensors, pieces, plain values and containers of these, as ``tree.flatten``.

        Raises:
            CheckpointError: the state holds something else; the copy before is intact then.
        """
        leaves, skeleton = flatten(state)
        replicated = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
        # The same division as in the save, which it must be.
        parts = divide(
            {path: (leaf.shape, leaf.itemsize) for path, leaf in replicated.items()},
            self._num_ranks,
        )
        held, self._copies = self._copies, {}  # what this state has no more is given back
        self.num_bytes = 0
        copies: dict[str, Tensor | Piece] = {}
        for path, leaf in leaves.items():
            if isinstance(leaf, Piece):
                whole = Shard.whole(leaf.tensor.shape)
                copies[path] = Piece(self._copied(path, leaf.tensor, whole, held), leaf.shard)
            else:
                copies[path] = self._copied(path, leaf, parts[path].get(self._rank), held)
        return unflatten(skeleton, copies.__getitem__)

    def _copied(
        self, path: str, tensor: Tensor, part: Shard | None, held: dict[str, Tensor]
    ) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor  # what writes it says why it cannot
        if part is None:
            return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)  # no memory
        copy = held.get(path)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            # Memory that is never written, outside the part, is never had.
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._copies[path] = copy
        here = Shard.whole(part.global_shape).slices(part)
        copy[here].copy_(tensor.detach()[here])
        self.num_bytes += part.numel * tensor.itemsize
        return copy


def on_cpu(state: Any) -> Any:
    """Return a state whose tensors are on the CPU: those that are there are not copied.

    Raises:
        CheckpointError: as ``Snapshot.take``.
    """
    leaves, skeleton = flatten(state)
    return unflatten(skeleton, {path: _on_cpu(leaf) for path, leaf in leaves.items()}.__getitem__)


def _on_cpu(leaf: Tensor | Piece) -> Tensor | Piece:
    if isinstance(leaf, Piece):
        return Piece(leaf.tensor.detach().cpu(), leaf.shard)
    return leaf.detach().cpu()
