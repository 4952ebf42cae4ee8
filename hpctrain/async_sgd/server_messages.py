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

    clock: int  # number of gradients that the worker has sent before
    slot: int  # index of the worker's slot that contains the gradient
    weight: float  # weight of the gradient in a mean
    has_gradient: bytes  # whether each parameter has a gradient: 0 or 1
    settings: Settings
    reads: bool  # whether the worker also requests values
    is_counted: bool  # whether set_num_samples has set the weight
    not_finite: str = ""  # name of a parameter whose gradient has NaN or inf; empty for weight 0
    is_near: bool = False  # whether the worker is on the server's node
    parts: Sequence[Tensor] = ()  # set by the server: the server's parts of the gradient

    @property
    def kind(self) -> str:
        """Optimizer settings as a string, which servers compare between workers."""
        plain = [
            {k: v.tolist() if isinstance(v, Tensor) else v for k, v in one.items()}
            for one in self.settings
        ]
        return str(plain)


class Read(NamedTuple):
    """Request to send the current values to a worker."""

    clock: int  # number of gradients that the worker has sent


class Settle(NamedTuple):
    """Request of a rank that takes no more steps until all ranks have sent this request."""

    where: str  # name of the call, for messages


class Leave(NamedTuple):
    """Last request of a rank; servers send no reply."""

    where: str  # name of the call, for messages; empty after an error


Request = Push | Read | Settle | Leave


class ServerReply(NamedTuple):
    """Reply of a server to a request."""

    clock: int = 0  # clock of the worker
    staleness: int = 0
    """``ClockedServer``: number of incomplete steps before the values; ``ImmediateServer``: number
    of updates by other workers before the gradient."""
    has_values: bool = False  # whether the worker's slot or this message contains new values
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
        """Set ``work``, the function that executes requests."""
        self._work = work

    def wait(self, done: Callable[[], object]) -> float:
        """Execute the requests, and process the replies with ``done``; return 0 seconds."""
        self._work(self.requests.receive())
        done()
        return 0.0

    def stop(self) -> None:
        """No-op: the server has no thread."""

    close = stop

    def leave(self, ranks: Sequence[int], content: object) -> None:
        """No-op: the server ends with its rank."""


ServerMessages = DirectMessages | LoopbackMessages
