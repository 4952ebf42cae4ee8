"""Results of operations of communicators, and counters of bytes and seconds."""

from operator import sub
from typing import NamedTuple, Protocol


class Traffic(NamedTuple):
    """Counters of one rank since the creation of the communicator."""

    node_bytes: int = 0  # bytes read or written in node memory
    rail_bytes: int = 0
    """Bytes sent by messages, plus bytes passed to MPI collectives."""
    waited_s: float = 0.0  # seconds of waits for other ranks
    rail_s: float = 0.0  # seconds spent on the rail without waits

    def since(self, earlier: "Traffic") -> "Traffic":
        """Return the difference to ``earlier`` counters."""
        return Traffic(*map(sub, self, earlier))


class Work(Protocol):
    """A started operation; on the CPU its result may be read after ``wait()``."""

    def wait(self) -> None:
        """Wait until the operation is complete; raise its error."""

    def done(self) -> bool:
        """Return whether ``wait()`` would return without waiting."""


class Finished:
    """The result of an operation that is complete."""

    def wait(self) -> None:
        """Return immediately."""

    def done(self) -> bool:
        """Return True."""
        return True


FINISHED = Finished()
