"""Table ``[comm]`` of a configuration."""

from dataclasses import dataclass
from typing import ClassVar

from hpctrain.core.checks import CheckedFields, Count, Overlap, Size
from hpctrain.core.units import parse_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CommConfig(CheckedFields):
    """How gradients travel."""

    table: ClassVar = "comm"
    overlap: Overlap = "auto"
    """When: on a thread, inline in the hooks, at the end of backward, or as the plan chooses."""
    bucket_size: Size = "25 MiB"
    """Largest message. Bigger hides latency, smaller starts to travel earlier."""
    ranks_per_node: Count = 0
    """Declares nodes on one host, of so many ranks each; 0 takes the machine as it is."""

    @property
    def bucket_bytes(self) -> int:
        """``bucket_size`` as a number."""
        return parse_bytes(self.bucket_size)
