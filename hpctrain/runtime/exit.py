"""A rank reaches its end: it waits for the others, and not for one that is lost."""

from typing import TYPE_CHECKING

from hpctrain.runtime.abort import FailureHooks

if TYPE_CHECKING:
    from hpctrain.comm.liveness import Liveness


def leave(presence: "Liveness", hooks: FailureHooks) -> None:
    """Wait until every rank has come to its end; end all ranks if one of them never will.

    Collective. ``shutdown()`` calls it, and the interpreter at exit, before anything is freed.
    """
    try:
        presence.farewell()
    except BaseException as error:  # at exit Python would print it and go on
        hooks.end(error)
