"""The plan: which algorithm moves what. It fixes the order of sums, so it is part of a run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.cluster.topology import Topology
from hpctrain.config import Settings
from hpctrain.units import KIB, MIB, format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How the ranks of one world move gradients; the same value on every rank."""

    node_memory: str
    """How the ranks of a node share memory: ``memfd``, ``window``, ``none`` (flat MPI), or
    ``alone`` in a world of one."""
    num_rails: int
    """Local ranks of each node that take part in the slow link; 0 on one node."""
    bucket_bytes: int
    """Largest message while gradients travel during backward."""
    overlap: str
    """``thread``: buckets travel beside backward; ``inline``: inside it; ``end``: after it."""
    threads: int
    """Torch's threads of each rank: the cores it really has."""
    staged_bytes: int = 16 * MIB
    """Ordinary tensors from this size on pass through node memory, smaller ones go flat."""
    ring_bytes: int = 64 * KIB
    """Bytes that one step of a ring must carry; below, the MPI library's algorithm is used."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON file."""
        return asdict(self)

    def describe(self) -> list[tuple[str, str]]:
        """Return rows of name and value for a table."""
        if self.node_memory == "alone":
            return [("gradients", "stay where they are: one rank"), ("threads", str(self.threads))]
        if self.node_memory == "none":
            path = "flat MPI"
        elif self.num_rails:
            path = f"node memory ({self.node_memory}), then {self.num_rails} rails"
        else:
            path = f"node memory ({self.node_memory})"
        buckets = f"in buckets of {format_bytes(self.bucket_bytes)}"
        when = {
            "thread": f"beside backward, on a thread, {buckets}",
            "inline": f"inside backward, {buckets}",
            "end": "after backward, one bucket per dtype",
        }
        ring = f"ring from {format_bytes(self.ring_bytes)} a step, else the library"
        return [
            ("gradients take", path),
            ("they travel", when[self.overlap]),
            *([("between nodes", ring)] if self.num_rails else []),
            ("other tensors", f"flat MPI below {format_bytes(self.staged_bytes)}"),
            ("threads per rank", str(self.threads)),
        ]


def choose_plan(
    topology: Topology, settings: Settings, *, node_memory: str, threads: Sequence[int]
) -> Plan:
    """Choose the plan by rule, from facts that are the same on every rank.

    Args:
        topology: of the world.
        settings: of rank 0.
        node_memory: name of the way that every node can share memory, or ``none``.
        threads: torch's threads of each rank.
    """
    overlap = settings.overlap
    if overlap == "auto":
        # A thread that sums competes with backward for cores; without a free one it only delays.
        num_busy = (max(threads) + 1) * len(topology.core_peers)
        free_core = topology.num_peer_cores >= num_busy
        overlap = "thread" if free_core else "end"
    return Plan(
        node_memory=node_memory,
        num_rails=0 if topology.num_nodes == 1 else min(topology.max_rails, 2 * topology.cards),
        bucket_bytes=settings.bucket_bytes,
        overlap=overlap,
        threads=min(threads),
    )
