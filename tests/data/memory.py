"""Provide numbered samples in memory, with the interface of a data set on disk."""

import threading
import time

import numpy as np
import torch

from hpctrain.core.errors import CorruptError
from hpctrain.data.format.dataset_manifest import Field
from hpctrain.data.samples import Ragged


class InMemory:
    """Hold samples: ``number`` counts them, ``tokens`` repeats the number ``number % 3`` times."""

    block_size = 4

    def __init__(self, num_samples, *, sample_bytes=50_000.0, damaged=(), uuid=None, slow_s=0.0):
        self.fields = {
            "number": Field.of((), "i8"),
            "tokens": Field.of((), "i4", ragged=True),
        }
        self.uuid = uuid or f"memory of {num_samples}"
        self.sample_bytes = sample_bytes
        self.in_memory = False  # so that the tests use threads
        self.damaged = list(damaged)
        self.asked = []
        self.taken = []
        self._num_samples = num_samples
        self._slow_s = slow_s
        self._lock = threading.Lock()

    def __len__(self):
        return self._num_samples

    def take(self, indices):
        assert not len(indices) or 0 <= min(indices) <= max(indices) < len(self)
        time.sleep(self._slow_s * (np.sum(indices) % 5))
        with self._lock:
            self.taken.append(np.array(indices))
        for start, stop in self.damaged:
            if ((start <= indices) & (indices < stop)).any():
                raise CorruptError(f"samples {start} to {stop - 1} are bad", start, stop)
        lengths = np.array(indices) % 3
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        tokens = torch.from_numpy(np.repeat(np.array(indices), lengths).astype(np.int32))
        return {"number": torch.from_numpy(np.array(indices)), "tokens": Ragged(tokens, offsets)}

    def will_need(self, indices):
        with self._lock:
            self.asked.append(np.array(indices))


def numbers(loader):
    """Return the numbers of the samples of each remaining batch."""
    return [batch.number.tolist() for batch in loader]
