"""Messages between workers and parameter servers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hpctrain.comm.direct_messages import DirectMessages, Message
from hpctrain.core.errors import HpctrainError

Settings = list[dict[str, Any]]
"""Options of each group of an optimizer, without its parameters."""


class Push(NamedTuple):
    """Request to apply the gradient of a worker."""

    clock: int  # of the worker before this step
    slot: int  # of its gradient in its node memory
    weight: float  # of its gradient in a mean
    has_gradient: bytes  # whether each parameter has one
    settings: Settings
    reads: bool  # whether it requests values
    is_counted: bool  # whether its weight follows from a given number of samples
    not_finite: str = ""  # name of a parameter whose gradient is NaN or infinite, if it counts
    is_near: bool = False  # whether the worker is on the server's node
    parts: Sequence[Tensor] = ()  # at the server: its parts of the gradient

    @property
    def kind(self) -> str:
        """The optimizer settings as a string, which servers compare between workers."""
        plain = [
            {k: v.tolist() if isinstance(v, Tensor) else v for k, v in one.items()}
            for one in self.settings
        ]
        return str(plain)


class Read(NamedTuple):
    """Request to send the current values to a worker."""

    clock: int


class Settle(NamedTuple):
    """Request of a rank that takes no more steps until all ranks have sent it."""

    where: str  # for messages


class Leave(NamedTuple):
    """Last request of a rank; servers send no reply."""

    where: str  # for messages, if the rank left after it had settled; empty after an error


Request = Push | Read | Settle | Leave


class ServerReply(NamedTuple):
    """Reply of a server to a request."""

    clock: int = 0  # of the worker
    staleness: int = 0  # of values in clocks; of a gradient in updates of other workers
    has_values: bool = False  # in the slot of the worker, or in the message
    error: HpctrainError | None = None


class LoopbackChannel(list[Message]):
    """Queue of requests or replies in a world of one rank."""

    def send(self, to: int, content: object, tensors: Sequence[Tensor] = ()) -> None:
        """Append a message."""
        self.append(Message(to, content, tensors))

    def receive(self) -> list[Message]:
        """Return and remove all messages."""
        received = self[:]
        self.clear()
        return received


class LoopbackMessages:
    """Replaces ``DirectMessages`` in a world of one rank: the server runs inside ``wait``."""

    def __init__(self) -> None:
        self.requests, self.replies = LoopbackChannel(), LoopbackChannel()

    def serve(self, work: Callable[[Sequence[Message]], bool]) -> None:
        """Set the function that carries out requests."""
        self._work = work

    def wait(self, done: Callable[[], object]) -> float:
        """Run the server, and process its replies; return the seconds waited."""
        self._work(self.requests.receive())
        done()
        return 0.0

    def stop(self) -> None:
        """No-op: there is no thread."""

    close = stop

    def leave(self, ranks: Sequence[int], content: object) -> None:
        """No-op: the server ends with its rank."""


ServerMessages = DirectMessages | LoopbackMessages
