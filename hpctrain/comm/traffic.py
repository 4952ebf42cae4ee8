"""Bytes and calls of a communicator so far."""

from typing import NamedTuple


class Traffic(NamedTuple):
    """Counters of one rank since the communicator was made."""

    node_bytes: int = 0
    """Bytes that this rank has read or written in the memory of its node."""
    rail_bytes: int = 0
    """Bytes that this rank has sent by messages; inside an MPI library the bytes of its calls."""
    waited_s: float = 0.0
    """Seconds in which this rank waited for others."""
    rail_s: float = 0.0
    """Seconds that this rank spent on its rail between nodes without waiting."""

    def since(self, earlier: "Traffic") -> "Traffic":
        """Return what was added after ``earlier``."""
        return Traffic(
            self.node_bytes - earlier.node_bytes,
            self.rail_bytes - earlier.rail_bytes,
            self.waited_s - earlier.waited_s,
            self.rail_s - earlier.rail_s,
        )
