"""The worker's end: requests to all parameter servers at once, and the values that come back."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.async_sgd.layout import Buffers, ParameterLayout
from hpctrain.async_sgd.server import (
    BY_MESSAGE,
    Answer,
    Leave,
    ParameterServer,
    Push,
    Read,
    Settle,
)
from hpctrain.comm.direct_messages import DirectMessages, Message
from hpctrain.core.errors import CommError, MismatchError

if TYPE_CHECKING:
    from torch import Tensor


class ParameterClient:
    """Asks the servers, each for its part, and puts values into the parameters."""

    def __init__(
        self,
        messages: DirectMessages,
        layout: ParameterLayout,
        buffers: Buffers,
        servers: Sequence[int],
        own: ParameterServer | None,
    ) -> None:
        """Take the ways to the servers, which are on these ranks; ``own`` is on this one."""
        self._messages, self._layout, self._buffers = messages, layout, buffers
        self._servers, self.own = list(servers), own
        self.waited_s = 0.0  # seconds that this rank has waited for servers
        self._failure: Answer | None = None

    def push(self, push: Push) -> list[Answer]:
        """Send what lies in a slot of this rank's gradients, and wait for the answers.

        Raises what has failed at a server: ``MismatchError`` or ``CommError``, on all ranks.
        """
        whole = self._buffers.gradient(push.slot)
        for number, rank in enumerate(self._servers):
            parts: Sequence[Tensor] = ()
            if not self._buffers.shares_with(rank):
                bounds = (self._layout.bounds(b, number) for b in range(len(whole)))
                parts = [flat[part] for flat, part in zip(whole, bounds, strict=True)]
            self._messages.requests.send(rank, push, parts)
        return self._answers()

    def ask(self, request: Read | Settle) -> list[Answer]:
        """Send a request to all servers and wait for the answers; raises as ``push``."""
        for rank in self._servers:
            self._messages.requests.send(rank, request)
        return self._answers()

    def leave(self) -> None:
        """Tell the servers that this rank takes no more steps; without waiting."""
        for rank in self._servers:
            self._messages.requests.send(rank, Leave())

    def _answers(self) -> list[Answer]:
        came: dict[int, Message] = {}

        def done() -> bool:
            for message in self._messages.replies.receive():
                self._see(message)
                came[message.source] = message
            return len(came) == len(self._servers)

        if self._failure is not None:
            self._raise(self._failure)
        self.waited_s += self._messages.wait(done)
        for number, rank in enumerate(self._servers):
            answer, tensors = came[rank].content, came[rank].tensors
            if answer.copy is not None:
                parts = tensors
                if answer.copy != BY_MESSAGE:
                    parts = self._buffers.values(rank, number, answer.copy)
                self._layout.take(number, parts)
        return [came[rank].content for rank in self._servers]

    def _see(self, message: Message) -> None:
        if message.content.error:
            self._failure = message.content
            self._raise(message.content)

    def _raise(self, failure: Answer) -> None:
        raise (MismatchError if failure.is_mismatch else CommError)(failure.error)
