"""The tree of ranks along which messages travel."""

from collections.abc import Sequence
from dataclasses import dataclass

FAN_OUT = 4
"""Children on the same kind of link. A level costs a latency and the work on as many messages;
for links of 10 to 50 us and 10 us of work on each, four make the shortest way to a thousand."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The place of one rank in the tree; rank 0 is the root."""

    rank: int
    """My rank."""
    size: int
    """Ranks in the tree."""
    parent: int | None
    """The rank towards the root; None at the root."""
    children: tuple[int, ...]
    """The ranks away from the root: first those of other nodes."""

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Return the parent, if there is one, and the children."""
        return self.children if self.parent is None else (self.parent, *self.children)


def tree_of(nodes: Sequence[Sequence[int]], rank: int) -> Tree:
    """Return the place of ``rank`` in the tree of all ranks.

    The first ranks of the nodes form a tree, and the ranks of each node another one below its
    first rank. So a node's messages leave it once.

    Args:
        nodes: the ranks of each node, numbered from 0 without gaps, in any order; a node is what
            shares memory, at worst each rank by itself.
        rank: whose place it is.
    """
    members = sorted(sorted(ranks) for ranks in nodes)
    leaders = [ranks[0] for ranks in members]
    mine = next(ranks for ranks in members if rank in ranks)
    parent, children = _place(mine, rank)
    if rank == mine[0]:
        parent, of_other_nodes = _place(leaders, rank)
        children = of_other_nodes + children
    return Tree(rank, sum(map(len, members)), parent, children)


def _place(ranks: list[int], rank: int) -> tuple[int | None, tuple[int, ...]]:
    """Return parent and children of ``rank`` where ``ranks[0]`` is the root."""
    place = ranks.index(rank)
    parent = ranks[(place - 1) // FAN_OUT] if place else None
    return parent, tuple(ranks[FAN_OUT * place + 1 : FAN_OUT * (place + 1) + 1])
