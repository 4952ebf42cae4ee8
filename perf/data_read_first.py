"""What it takes to read a set and then to copy it, as an order must that mixes all of it.

Its first batch needs samples from all over the files, so that no loader can begin earlier. Two
threads copy as fast as numpy can, into memory that is used again.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from data_memory import read_through
from data_ways import Epoch, Memmap
from numpy.typing import NDArray

from hpctrain.units import MIB

THREADS = 2
COPY_BYTES = 16 * MIB

Copied = tuple[NDArray[np.uint8], NDArray[np.int64]]


class ReadFirst(Memmap):
    """A sequential read of a raw file, then np.take out of its map, by two threads."""

    name = "sequential read, then np.take"

    def epoch(self) -> Epoch:
        """Read an epoch."""
        data = self.kind.map(self.path)
        read_through(self.path)
        together = max(1, COPY_BYTES // (self.batch * self.kind.sample_bytes)) * self.batch
        order = np.random.default_rng().permutation(len(data))
        # One more than there are copies ahead: the consumer has it.
        memory = deque(
            np.empty((together, *self.kind.shape), np.uint8) for _ in range(THREADS + 1)
        )

        def copy(rows: NDArray[np.int64], x: NDArray[np.uint8]) -> Copied:
            # numpy buffers the result unless told how to treat indices out of range.
            return np.take(data, rows, axis=0, out=x[: len(rows)], mode="clip"), rows

        def batches(copied: Copied) -> Epoch:
            for start in range(0, len(copied[1]), self.batch):
                x, y = (part[start : start + self.batch] for part in copied)
                yield torch.from_numpy(x), torch.from_numpy(y)

        with ThreadPoolExecutor(THREADS) as pool:
            ahead: deque[Future[Copied]] = deque()
            for start in range(0, len(order), together):
                if len(ahead) == THREADS:
                    yield from batches(ahead.popleft().result())
                memory.rotate(1)
                ahead.append(pool.submit(copy, order[start : start + together], memory[0]))
            for copied in ahead:
                yield from batches(copied.result())
