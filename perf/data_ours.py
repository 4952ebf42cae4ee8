"""The methods of hpctrain: first and later epochs of a loader, its orders, and ``take`` alone."""

from pathlib import Path

import numpy as np
from data_methods import SHARDS, Epoch, Kind, Method
from numpy.typing import NDArray

from hpctrain.core.units import MIB
from hpctrain.data.loader import Loader
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.steps import OrderName
from hpctrain.data.writer import ShardWriter

WRITE_BYTES = 64 * MIB


class First(Method):
    """First epoch after a data set is opened, which checks the crc32 of every block."""

    name = "hpctrain, first epoch"
    form = "hpctrain"
    whole = True
    order: OrderName = "global"
    loader: Loader | None = None

    @classmethod
    def write(cls, kind: Kind, samples: NDArray[np.uint8], path: Path) -> None:
        """Write the shards."""
        fields = {"x": (kind.shape, "u1"), "y": ((), "i8")}
        at_once = WRITE_BYTES // kind.sample_bytes
        per_shard = -(-kind.num_samples // SHARDS)
        with ShardWriter(path, fields, samples_per_shard=per_shard) as writer:
            for start in range(0, kind.num_samples, at_once):
                x = samples[start : start + at_once]
                writer.append({"x": x, "y": np.arange(start, start + len(x))})

    def epoch(self) -> Epoch:
        """Open the data set and read an epoch."""
        dataset = ShardedDataset(self.path, verify="first")
        self.loader = Loader(dataset, global_batch=self.batch, order=self.order, seed=1)
        yield from self.again()

    def again(self) -> Epoch:
        """Read an epoch of the open data set."""
        assert self.loader
        for batch in self.loader:
            pair = [(batch["x"], batch["y"])]
            del batch  # its memory is reused when no reference remains
            yield pair.pop()


class FirstWindow(First):
    """The first epoch in ``window`` order, which reads whole blocks."""

    name = "hpctrain, window order"
    order = "window"


class FirstGlobal(First):
    """The first epoch in ``global`` order."""

    name = "hpctrain, global order"


class Second(First):
    """Epoch after the first epoch, as most epochs of a training run."""

    name = "hpctrain, second epoch"

    def prepare(self) -> None:
        """Read the first epoch, in the first call only."""
        if self.loader is None:
            for _ in super().epoch():
                pass

    def epoch(self) -> Epoch:
        """Read the second epoch, or a later one."""
        yield from self.again()


class Take(Second):
    """``ShardedDataset.take`` without the loader, after the checks of all blocks."""

    name = "hpctrain, ds.take"

    def epoch(self) -> Epoch:
        """Read an epoch in a random order of numpy."""
        assert self.loader
        dataset = self.loader.dataset
        for rows in self.shuffled():
            pair = [tuple(dataset.take(rows).values())]
            yield pair.pop()
