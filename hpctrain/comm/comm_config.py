"""Table ``[comm]`` of a configuration."""

from dataclasses import dataclass
from typing import ClassVar

from hpctrain.core.checks import CheckedFields, Count, Overlap, Size
from hpctrain.core.units import parse_size


@dataclass(frozen=True, kw_only=True, slots=True)
class CommConfig(CheckedFields):
    """How gradients are sent."""

    table: ClassVar = "comm"
    overlap: Overlap = "auto"
    """When gradients are sent: by a thread, inline in the hooks, at the end of backward, or as the
    plan chooses (auto)."""
    bucket_size: Size = "25 MiB"
    """Largest message of gradients. Larger messages hide latency, smaller ones are sent
    earlier."""
    ranks_per_node: Count = 0
    """Number of ranks of a simulated node, to divide one host into several nodes; 0 for the real
    nodes."""

    @property
    def bucket_bytes(self) -> int:
        """``bucket_size`` as a number."""
        return parse_size(self.bucket_size)
