"""What checkpoints cost a run."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a checkpoint cost."""

    step: int
    num_bytes: int
    """Of all tensors, on all ranks."""
    stall_s: float
    """How long the training stood still, the longest of all ranks."""
    write_s: float
    """Until all was on disk, the longest of all ranks."""

    @property
    def bytes_per_s(self) -> float:
        """Speed of all ranks together."""
        return self.num_bytes / self.write_s if self.write_s else math.inf
