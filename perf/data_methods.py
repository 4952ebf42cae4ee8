"""Methods that read samples in random order with numpy, h5py and torch only.

A ``Method`` writes its files once and then iterates over epochs. Each batch is a pair of torch
tensors ``(samples, labels)``; the label of a sample is its index, to check the sample.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Pair = tuple[Tensor, Tensor]
Epoch = Generator[Pair, None, None]

SHARDS = 4
"""Files of a data set, where a form has several."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Shape and number of the samples of a data set; elements are bytes."""

    name: str
    shape: tuple[int, ...]
    num_samples: int

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample without its label."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples."""
        return self.num_samples * self.sample_bytes

    def map(self, path: Path) -> NDArray[np.uint8]:
        """Map the samples of a raw file."""
        return np.memmap(path, np.uint8, "r", shape=(self.num_samples, *self.shape))


class Method(ABC):
    """Base of the methods; a new object has not opened the files."""

    name: str
    """In the table."""
    form: str
    """Name of its files; methods with the same form read the same files."""
    whole: bool = False
    """Whether an epoch is always read to its end: it is fast, or a later one builds on it."""

    def __init__(self, kind: Kind, folder: Path, batch: int) -> None:
        """Store the options: samples ``kind`` in ``folder``, in batches of ``batch`` samples."""
        self.kind = kind
        self.batch = batch
        self.path = folder / self.form

    @classmethod
    @abstractmethod
    def write(cls, kind: Kind, samples: NDArray[np.uint8], path: Path) -> None:
        """Write all samples, with their indices as labels (int64)."""

    @abstractmethod
    def epoch(self) -> Epoch:
        """Read all samples in random order; a generator, which ends its workers when closed."""

    def prepare(self) -> None:
        """Prepare an epoch, outside of its time; a no-op for most methods."""
        return

    def close(self) -> None:
        """Remove resources that would outlive this object; a no-op for most methods."""
        return

    def shuffled(self) -> Iterator[NDArray[np.int64]]:
        """Yield the sample indices of each batch of an epoch."""
        order = np.random.default_rng().permutation(self.kind.num_samples)
        for start in range(0, len(order), self.batch):
            yield order[start : start + self.batch]


class Memmap(Method):
    """np.memmap of a raw file, and np.take into a buffer that all batches share."""

    name = "raw np.memmap"
    form = "raw"
    whole = True
    _data: NDArray[np.uint8] | None = None

    @classmethod
    def write(cls, kind: Kind, samples: NDArray[np.uint8], path: Path) -> None:
        """No-op: ``samples`` are a map of the file."""

    def epoch(self) -> Epoch:
        """Read an epoch; the first epoch opens the map, and includes its page faults."""
        if self._data is None:
            self._data = self.kind.map(self.path)
        labels = np.arange(self.kind.num_samples)
        x, y = np.empty((self.batch, *self.kind.shape), np.uint8), np.empty(self.batch, np.int64)
        for rows in self.shuffled():
            some = len(rows)
            # numpy buffers the result unless mode is set.
            np.take(self._data, rows, axis=0, out=x[:some], mode="clip")
            np.take(labels, rows, axis=0, out=y[:some], mode="clip")
            yield torch.from_numpy(x[:some]), torch.from_numpy(y[:some])


class Hdf5(Method):
    """A contiguous HDF5 file, ``dataset[i]`` for each sample, np.stack; labels from memory."""

    name = "h5py, sample by sample"
    form = "plain.h5"

    @classmethod
    def write(cls, kind: Kind, samples: NDArray[np.uint8], path: Path) -> None:
        """Write one file."""
        with h5py.File(path, "w") as file:
            file["x"] = samples
            file["y"] = np.arange(kind.num_samples)

    def epoch(self) -> Epoch:
        """Read an epoch."""
        with h5py.File(self.path) as file:
            data, labels = file["x"], file["y"][:]
            for rows in self.shuffled():
                x = np.stack([data[i] for i in rows])
                yield torch.from_numpy(x), torch.from_numpy(labels[rows])


class Hdf5Samples(Dataset[Any]):
    """The samples of an HDF5 file, opened in each process at first use; labels from memory."""

    def __init__(self, path: Path) -> None:
        """Read the labels."""
        self._path = path
        self._data: Any = None
        with h5py.File(path) as file:
            self._labels = file["y"][:]

    def __len__(self) -> int:
        """Count the samples."""
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        """Read a sample."""
        if self._data is None:
            self._data = h5py.File(self._path)["x"]
        return self._data[index], self._labels[index]


class Stock(Hdf5):
    """DataLoader of torch over ``Hdf5Samples``, with its default collation, in this process."""

    name = "DataLoader over h5py, 0 workers"
    num_workers = 0

    def epoch(self) -> Epoch:
        """Read an epoch."""
        dataset = Hdf5Samples(self.path)
        yield from DataLoader(dataset, self.batch, shuffle=True, num_workers=self.num_workers)


class StockWorkers(Stock):
    """``Stock`` with two worker processes."""

    name = "DataLoader over h5py, 2 workers"
    num_workers = 2
