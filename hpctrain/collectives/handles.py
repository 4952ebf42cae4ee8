"""Handles of asynchronous operations: ``poll`` and ``synchronize``."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, Protocol

from torch import Tensor

from hpctrain.core.errors import ConfigError
from hpctrain.negotiation.handle import Handle, TensorHandle
from hpctrain.negotiation.request import Result

Take = Callable[[Result], Any]
"""Makes what the user gets of the result of a request."""

only: Callable[[Result], Tensor] = itemgetter(0)
"""Take the single tensor."""


def group(result: Result) -> list[Tensor]:
    """Take all tensors."""
    return result


class Pending(Protocol):
    """An operation that was started."""

    def done(self) -> bool:
        """Say whether ``wait()`` would return, or raise, at once."""

    def wait(self) -> Any:
        """Return the result, or raise what went wrong."""


class Operation:
    """The handle of an operation that was started."""

    __slots__ = ("_handle", "_take")

    def __init__(self, handle: Handle, take: Take) -> None:
        self._handle = handle
        self._take = take

    def done(self) -> bool:
        """Say whether ``wait()`` would return, or raise, at once."""
        return self._handle.is_done

    def wait(self) -> Any:
        """Return the result, or raise what went wrong; may be called again."""
        return self._take(self._handle.wait())


def poll(handle: Pending) -> bool:
    """Say whether ``synchronize(handle)`` would return, or raise, at once. Not collective.

    Raises:
        ConfigError: it is no handle.
    """
    return _checked(handle).done()


def synchronize(handle: Pending) -> Any:
    """Wait for an operation, and return its result. It may be called again, for the same result.

    Args:
        handle: what a function whose name has ``_async`` in it has returned.

    Returns:
        A tensor; a list of them for a ``grouped`` operation; of ``alltoall_async`` the tensor and
        the received splits. An operation in place returns the tensors that it was given.

    Raises:
        HorovodInternalError: the operation failed, on every rank of the process set: say, the
            ranks gave the same name to operations that do not fit together.
        RankLostError: another rank died or left.
        ConfigError: it is no handle.
    """
    if isinstance(handle, TensorHandle):  # as a rule, and there may be thousands
        return handle.wait()
    return _checked(handle).wait()


def _checked(handle: Pending) -> Pending:
    if hasattr(handle, "wait") and hasattr(handle, "done"):
        return handle
    raise ConfigError(
        f"a handle is what a function ending in _async returns, got {type(handle).__name__}"
    )
