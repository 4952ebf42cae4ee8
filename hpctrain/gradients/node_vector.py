"""A vector that the ranks of a node hold together, once: each local rank has a slice of it."""

import torch
from torch import Tensor

from hpctrain.comm.bucket import slice_bounds
from hpctrain.comm.communicator import Communicator


class NodeVector:
    """A vector of zeros in node memory. What one rank writes, others read after a barrier."""

    def __init__(self, node: Communicator, numel: int, dtype: torch.dtype) -> None:
        """Make it. Collective over ``node``.

        Args:
            node: the ranks of this node. Where they share no memory each holds all of it.
            numel: elements.
            dtype: of them.

        Raises:
            NodeMemoryError: there is not enough memory; on every rank.
        """
        slices = [slice_bounds(numel, node.size, rank) for rank in range(node.size)]
        largest = max(bounds.stop - bounds.start for bounds in slices)
        peers = node.new_bucket(largest, dtype).peers
        if peers:
            self.parts = tuple(
                (bounds, peer[: bounds.stop - bounds.start])
                for bounds, peer in zip(slices, peers, strict=True)
            )
            """All slices, and where they lie in the whole."""
            self.bounds, self.own = self.parts[node.rank]
        else:
            self.bounds, self.own = slice(0, numel), torch.zeros(numel, dtype=dtype)
            self.parts = ((self.bounds, self.own),)

    def read(self, out: Tensor) -> None:
        """Copy all of it into a flat tensor; a barrier of the node comes before."""
        for bounds, part in self.parts:
            out[bounds].copy_(part)
