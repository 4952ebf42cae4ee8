"""Ownership of the rows of a table, by the placement of ranks on nodes."""

from collections.abc import Sequence

import numpy as np

from hpctrain.async_sgd.sharded_embedding_rows import Places, keys_of


class RowOwners:
    """Assignment of rows to ranks, and the ranks with which this rank exchanges rows.

    Owners are the ranks, numbered node by node, so that the rows of a node are one range.

    Args:
        num_rows: number of rows of the table.
        nodes: the ranks of each node.
        rank: this rank.
    """

    def __init__(self, num_rows: int, nodes: Sequence[Sequence[int]], rank: int) -> None:
        self.num_rows = num_rows
        self.ranks = [each for node in nodes for each in node]  # rank of each owner
        self.here = next(node for node in nodes if rank in node)
        """The ranks of this node."""
        self.local_rank = self.here.index(rank)
        self.per_rank = -(-num_rows // len(self.ranks))
        first = self.ranks.index(self.here[0])
        self.first_on_node = first * self.per_rank
        self.start, self.stop = self.range_of(first + self.local_rank)
        places = [(node, local) for node in nodes for local in range(len(node))]
        self.partners = [
            owner
            for owner, (node, local) in enumerate(places)
            if (local if node == self.here else local % len(self.here)) == self.local_rank
        ]
        """Owners with which this rank exchanges rows for its node: this rank, and a fixed part of
        the owners on each other node."""

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return len(self.here)

    @property
    def size(self) -> int:
        """Number of rows that this rank owns."""
        return self.stop - self.start

    def range_of(self, owner: int) -> tuple[int, int]:
        """Return the first row of ``owner``, and one past its last row."""
        first = owner * self.per_rank
        return min(first, self.num_rows), min(first + self.per_rank, self.num_rows)

    def keys_for(self, parts: Sequence[Places], owner: int) -> Places:
        """Return the keys in ``parts``, each a sorted array, whose rows ``owner`` stores."""
        bounds = keys_of(np.array(self.range_of(owner)), 0)
        return np.concatenate([keys[slice(*np.searchsorted(keys, bounds))] for keys in parts])
