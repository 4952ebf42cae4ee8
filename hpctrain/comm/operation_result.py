"""Results of the operations of communicators: works, and counters of what was moved."""

from operator import sub
from typing import NamedTuple, Protocol


class Traffic(NamedTuple):
    """Counters of one rank since the communicator was made."""

    node_bytes: int = 0  # bytes that this rank has read or written in the memory of its node
    rail_bytes: int = 0
    """Bytes that this rank has sent by messages; inside an MPI library the bytes of its calls."""
    waited_s: float = 0.0  # seconds in which this rank waited for others
    rail_s: float = 0.0  # seconds that this rank spent on its rail between nodes without waiting

    def since(self, earlier: "Traffic") -> "Traffic":
        """Return what was added after ``earlier``."""
        return Traffic(*map(sub, self, earlier))


class Work(Protocol):
    """An operation that was started; on CPU its result may be read after ``wait()``."""

    def wait(self) -> None:
        """Return when the result is there; raise what the operation raised."""

    def done(self) -> bool:
        """Say whether ``wait()`` would return at once."""


class Finished:
    """The work of an operation that was complete when it returned."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Say yes."""
        return True


FINISHED = Finished()
