"""Sequential read of a data set, followed by a copy in random order.

The first batch of a completely random order needs samples from all parts of the files, so no
loader can start earlier. Two threads copy with numpy into reused memory.
"""

from math import ceil

import numpy as np
import torch
from data_memory import read_through
from data_methods import Epoch, Memmap
from numpy.typing import NDArray

from hpctrain.core.units import MIB
from hpctrain.data.reading import prefetched

THREADS = 2
COPY_BYTES = 16 * MIB


class ReadFirst(Memmap):
    """Sequential read of a raw file, then np.take from its map in two threads."""

    name = "sequential read, then np.take"

    def epoch(self) -> Epoch:
        """Read an epoch."""
        data = self.kind.map(self.path)
        read_through(self.path)
        together = max(1, COPY_BYTES // (self.batch * self.kind.sample_bytes)) * self.batch
        order = np.random.default_rng().permutation(len(data))
        # One more than there are copies ahead: the consumer has it.
        memory = [np.empty((together, *self.kind.shape), np.uint8) for _ in range(THREADS + 1)]

        def copy(number: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
            rows = order[number * together : (number + 1) * together]
            x = memory[number % len(memory)][: len(rows)]
            # numpy buffers the result unless mode is set.
            return np.take(data, rows, axis=0, out=x, mode="clip"), rows

        numbers = range(ceil(len(order) / together))
        with prefetched(copy, numbers, threads=THREADS, depth=THREADS) as parts:
            for x, y in parts:
                for start in range(0, len(y), self.batch):
                    some = slice(start, start + self.batch)
                    yield torch.from_numpy(x[some]), torch.from_numpy(y[some])
