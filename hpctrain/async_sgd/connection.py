"""Messages between a method and its servers, for as long as method and world exist."""

import weakref
from collections.abc import Callable, Sequence

from hpctrain.async_sgd.server import Leave, OwnMessages
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.direct_messages import DirectMessages
from hpctrain.runtime import world
from hpctrain.runtime.rebuild import RebuildStage


class Farewell(weakref.finalize):  # type: ignore[type-arg]
    """Sends the last request of a rank."""

    __slots__ = ()


def connected(
    let_go: Callable[[], None], comm: Communicator, mates: Sequence[int], servers: Sequence[int]
) -> tuple[DirectMessages | OwnMessages, Farewell | None]:
    """Return messages, and what lets servers know that this rank sends no more. Collective.

    The world calls ``let_go``, a method of an object that it does not keep alive, before it closes
    the messages. The farewell is sent when it is called or the object is garbage; in a world of
    one there is none.
    """
    here, kept = world.current(), weakref.WeakMethod(let_go)
    messages: DirectMessages | OwnMessages = OwnMessages()
    farewell: Farewell | None = None
    if here.ranks is not None and here.presence is not None:
        look, limit_s = here.presence.check, here.settings.timeout
        here.attachments.requests.connect(comm, mates)
        messages = DirectMessages(here.ranks, here.attachments.requests, look, limit_s)
        owner = let_go.__self__  # type: ignore[attr-defined]
        farewell = Farewell(owner, messages.leave, [*servers], Leave("close()"))
        farewell.atexit = False

    def close() -> None:
        if (function := kept()) is not None:
            function()
        messages.close()

    here.rebuild.register(RebuildStage.HOLDERS, close=close)
    return messages, farewell
