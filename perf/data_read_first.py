"""What it takes to read a set and then to copy it, as an order must that mixes all of it."""

from data_memory import read_through
from data_ways import Epoch, Memmap


class ReadFirst(Memmap):
    """A sequential read of a raw file, then np.take out of its map."""

    name = "sequential read, then np.take"

    def epoch(self) -> Epoch:
        """Read an epoch."""
        read_through(self.path)
        yield from super().epoch()
