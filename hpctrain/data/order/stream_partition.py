"""Blocks of each stream of a window order: the same in every epoch.

So a node reads the same part of the data in every epoch, and can keep it at hand.
"""

import numpy as np

from hpctrain.data.order.feistel import Feistel
from hpctrain.data.order.order import as_indices, as_words
from hpctrain.data.samples import Indices

_KEY = 1  # as none of an epoch


def rank_lanes(first: int, last: int, *, size: int, lanes: int) -> range:
    """Return the lanes that the ranks ``[first, last)`` of ``size`` read, in every epoch.

    A few of their samples are of the next lane, where lanes do not go into ranks or batches.
    """
    return range(first * lanes // size, -(-last * lanes // size))


def lane_blocks(n: int, seed: int, lane: int, *, block: int, lanes: int) -> Indices:
    """Return the blocks of a lane; block ``b`` is the samples ``[b * block, (b + 1) * block)``.

    The same in every epoch. Every block is in one lane, a short last one as well.
    """
    return StreamPartition(n, seed, block, lanes).blocks(np.arange(lane, -(-n // block), lanes))


class StreamPartition:
    """The blocks of a data set dealt out to lanes: slot ``s`` belongs to lane ``s % lanes``."""

    def __init__(self, n: int, seed: int, block: int, lanes: int) -> None:
        """Derive the keys; arguments as in ``lane_blocks``."""
        self.num_full = n // block
        self.num_turns = self.num_full // lanes
        self._network = Feistel(max(1, self.num_full), seed, 0, _KEY)

    def blocks(self, slots: Indices) -> Indices:
        """Return the blocks in some slots; a short last block keeps its number."""
        full = slots < self.num_full
        blocks = self._network.forward(as_words(np.where(full, slots, 0)))
        return np.where(full, as_indices(blocks), slots)

    def slots(self, blocks: Indices) -> Indices:
        """Undo ``blocks``."""
        full = blocks < self.num_full
        slots = self._network.backward(as_words(np.where(full, blocks, 0)))
        return np.where(full, as_indices(slots), blocks)
