"""Which node each rank runs on."""

import random
from collections.abc import Sequence
from typing import Literal, get_args

Order = Literal["block", "cyclic", "random"]
ORDERS: tuple[Order, ...] = get_args(Order)


def place(ranks_per_node: Sequence[int], order: Order = "block", seed: int = 0) -> list[int]:
    """Return the node of each rank.

    Args:
        ranks_per_node: how many ranks each node runs, 0 or more.
        order: node after node, in turn, or mixed at random.
        seed: the same one mixes alike.
    """
    block = [node for node, ranks in enumerate(ranks_per_node) for _ in range(ranks)]
    if order == "block":
        return block
    if order == "cyclic":
        turns = [turn for ranks in ranks_per_node for turn in range(ranks)]
        return [node for _, node in sorted(zip(turns, block, strict=True))]
    random.Random(seed).shuffle(block)
    return block


def share(num_ranks: int, num_nodes: int) -> list[int]:
    """Return how many ranks each node runs when they are shared out evenly, the first get more."""
    return [(num_ranks + num_nodes - 1 - node) // num_nodes for node in range(num_nodes)]
