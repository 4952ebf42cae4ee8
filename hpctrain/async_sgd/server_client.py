"""The connection of a rank to the parameter servers: memory, requests and replies."""

import weakref
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from hpctrain.async_sgd.parameter_layout import VALUES, ParameterLayout, Slots
from hpctrain.async_sgd.requirements import Roles
from hpctrain.async_sgd.server_messages import (
    Leave,
    LoopbackMessages,
    Push,
    Read,
    ServerMessages,
    ServerReply,
    Settle,
)
from hpctrain.comm.direct_messages import DirectMessages
from hpctrain.comm.owner import Owner
from hpctrain.core.errors import HpctrainError
from hpctrain.runtime import world
from hpctrain.runtime.rebuild import RebuildStage


class _LeaveFinalizer(weakref.finalize):  # type: ignore[type-arg]
    """Finalizer that sends ``Leave``, the last request of a rank."""

    __slots__ = ()


class ServerClient:
    """Sends the requests of this rank to all servers, and receives values in the replies.

    The last request of a rank, ``Leave``, is sent by ``send_leave`` or ``leave_settled``, or when
    the object with the method ``on_close`` is garbage collected. A world of one rank sends no
    ``Leave``. The constructor is collective.

    Args:
        layout: layout of the parameters.
        roles: roles of all ranks.
        num_slots: number of gradients of this rank that may be in flight concurrently.
        on_close: bound method that is called before the world closes the messages; the reference
            to its object is weak.
    """

    _error: HpctrainError | None = None  # error that a server has reported

    def __init__(
        self, layout: ParameterLayout, roles: Roles, num_slots: int, on_close: Callable[[], None]
    ) -> None:
        self.roles, self.comm = roles, world.current().comm
        self.waited_s = 0.0  # seconds that this rank has waited for replies
        self._layout, self._num_slots, self._owner = layout, num_slots, Owner()
        self._on_close = weakref.WeakMethod(on_close)
        self._finalizer: _LeaveFinalizer | None = None
        self.reconnect()

    def reconnect(self) -> None:
        """Allocate slots, and open channels to the servers of the current world. Collective."""
        here = world.current()
        mates = next(ranks for ranks in here.topology.nodes if self.comm.rank in ranks)
        self.slots = Slots(self.comm, self._layout, mates, self._num_slots + 1)
        self.cancel_leave()
        messages: ServerMessages = LoopbackMessages()
        self._finalizer = None
        if here.ranks is not None and here.presence is not None:
            requests = here.attachments.requests
            requests.connect(self.comm, mates)
            messages = DirectMessages(
                here.ranks, requests, here.presence.check, here.settings.timeout
            )
            last = [*self.roles.servers], Leave("close()")
            owner = self._on_close().__self__  # type: ignore[union-attr]
            self._finalizer = _LeaveFinalizer(owner, messages.leave, *last)
            self._finalizer.atexit = False
        self.messages, on_close = messages, self._on_close

        def close() -> None:
            if (function := on_close()) is not None:
                function()
            messages.close()

        here.rebuild.register(RebuildStage.HOLDERS, close=close)

    def move(self, numbers: Mapping[int, int]) -> None:
        """Close the channels of a world that has lost ranks; ``reconnect`` opens new channels.

        Args:
            numbers: new rank of each surviving rank, by its old rank.
        """
        self.messages.stop()
        self.comm = world.current().comm
        self.roles = self.roles.moved(self.comm.rank, numbers)

    @property
    def has_peers(self) -> bool:
        """Whether the world has other ranks."""
        return self._finalizer is not None

    @property
    def is_open(self) -> bool:
        """Whether this rank can send requests, because it has not sent ``Leave``."""
        return self._finalizer is None or self._finalizer.alive

    def send_leave(self) -> None:
        """Send ``Leave`` for this rank, unless ``Leave`` was sent before."""
        if self._finalizer is not None:
            self._finalizer()

    def cancel_leave(self) -> bool:
        """Disable the finalizer that sends ``Leave``; return whether it was still enabled."""
        return self._finalizer is not None and self._finalizer.detach() is not None

    def leave_settled(self) -> None:
        """Send ``Leave`` for a rank that has settled or failed, unless it was sent before."""
        if self.cancel_leave():
            self.messages.leave(self.roles.servers, Leave(""))

    def send_and_wait(
        self,
        request: Push | Read | Settle,
        gradients: Sequence[Tensor | None] = (),
        *,
        takes: bool = True,
    ) -> list[ServerReply]:
        """Send a request to all servers and wait for their replies.

        Args:
            request: request to send; a ``Push`` contains the index of the slot for ``gradients``.
            gradients: gradient of each parameter, for a ``Push``.
            takes: whether values in the replies are copied into the parameters.

        Raises:
            HpctrainError: a server has failed.
        """
        self._owner.check()  # before the write to memory that the servers read
        own = self.comm.rank
        if isinstance(request, Push):
            self._layout.fill(self.slots.of(own, request.slot), gradients)
        replies = self._replies(request)
        if takes and all(reply.has_values for reply in replies):
            self._layout.take(self.slots.of(own, VALUES))
        return replies

    def _replies(self, request: Push | Read | Settle) -> list[ServerReply]:
        received: dict[int, ServerReply] = {}
        values = self.slots.of(self.comm.rank, VALUES)

        def done() -> bool:
            for source, reply, tensors in self.messages.replies.receive():
                received[source] = reply
                self._error = self._error or reply.error
                number = self.roles.servers.index(source)
                own = self._layout.parts(values, number) if tensors else ()
                for place, tensor in zip(own, tensors, strict=True):
                    place.copy_(tensor)
            return self._error is not None or len(received) == len(self.roles.servers)

        if self._error is None:
            self.send(request)
            self.waited_s += self.messages.wait(done)
        if self._error is not None:
            raise self._error
        return [*received.values()]

    def send(self, request: Push | Read | Settle) -> None:
        """Send a request to all servers without waiting for replies."""
        self._owner.check()
        for number, rank in enumerate(self.roles.servers):
            parts: Sequence[Tensor] = ()
            if isinstance(request, Push) and rank not in self.slots:
                parts = self._layout.parts(self.slots.of(self.comm.rank, request.slot), number)
            self.messages.requests.send(rank, request, parts)
