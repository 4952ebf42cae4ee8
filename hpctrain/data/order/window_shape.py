"""Shape of a window order: the number of blocks that it mixes."""

from dataclasses import dataclass
from math import ceil

from hpctrain.core.errors import DataError
from hpctrain.core.units import KIB

BLOCK_BYTES = 64 * KIB
"""A read of this size from a disk costs little more than a smaller one."""
LANES = 1024
"""At most about so many by default: every rank of a usual job has lanes of its own."""
MIXED_PER_SAMPLE, MIXED = 32, 8192
"""By default a window has so many blocks for each sample of a global batch, and at least so
many: class-sorted data then come as evenly as from a permutation, within one percent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowShape:
    """What a window order mixes; the samples of ``lanes * window`` blocks are in memory."""

    block: int
    """Neighbouring samples that are read together."""
    window: int
    """Blocks of a lane that are mixed; somewhat more where they do not go into the lane."""
    lanes: int
    """Parts of the data that are read side by side."""

    def __post_init__(self) -> None:
        """Check that all are positive."""
        if min(self.block, self.window, self.lanes) < 1:
            raise DataError(
                f"block, window and lanes of a window order are positive, got {self.block}, "
                f"{self.window} and {self.lanes}"
            )

    @classmethod
    def of(cls, global_batch: int, sample_bytes: float, block_size: int) -> "WindowShape":
        """Choose a shape that mixes well.

        It keeps ``32 * max(global_batch, 256)`` blocks in memory, on all nodes together: at
        64 KiB each 512 MiB for a global batch of 256, 8 GiB for one of 4096.

        Args:
            global_batch: samples of a step.
            sample_bytes: mean size of a sample.
            block_size: samples that the data set reads as one.
        """
        lanes = global_batch // ceil(global_batch / LANES)
        mixed = max(MIXED_PER_SAMPLE * global_batch, MIXED)
        unit_bytes = max(1.0, sample_bytes * block_size)
        return cls(
            block=block_size * ceil(BLOCK_BYTES / unit_bytes),
            window=ceil(mixed / lanes),
            lanes=lanes,
        )

    @property
    def num_samples(self) -> int:
        """Samples of a window, in all lanes together."""
        return self.block * self.window * self.lanes
