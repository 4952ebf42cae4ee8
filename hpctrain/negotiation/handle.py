"""Handle of an operation that may still be under way."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from hpctrain.negotiation.recurring import Recurring
    from hpctrain.negotiation.request import Request, Result


class Drives(Protocol):
    """What carries operations out while somebody waits for them."""

    def finish(self, handle: "Handle") -> None:
        """Return when an operation is done."""

    def look(self) -> None:
        """Do what can be done without waiting, where no thread does so."""


class Handle:
    """One operation of this rank: ask ``done()``, or ``wait()`` for its result."""

    __slots__ = ("_controller", "_error", "_request", "_result", "is_done", "name", "since")

    recurring: "Recurring | None" = None
    """What it is one of; None for all but a ``TensorHandle``."""

    def __init__(
        self, controller: Drives | None, request: "Request", name: str | None = None
    ) -> None:
        """Begin.

        Args:
            controller: drives while somebody waits; None where nobody will.
            request: what is asked for.
            name: by which the ranks find each other's requests; None for that of the request.
        """
        self._request = request
        self.name = (request.name or "") if name is None else name
        self.since = time.monotonic()
        self.is_done = False
        self._controller = controller
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def request(self) -> "Request":
        """What is asked for."""
        return self._request

    def done(self) -> bool:
        """Say whether ``wait()`` would return, or raise, at once."""
        if not self.is_done and self._controller is not None:
            self._controller.look()
        return self.is_done

    def wait(self) -> "Result":
        """Return the result, or raise what went wrong; the caller's thread drives meanwhile.

        Raises:
            HorovodInternalError: the ranks disagree about this operation; on every rank.
            RankLostError: another rank died.
        """
        if not self.is_done and self._controller is not None:
            self._controller.finish(self)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def succeed(self, result: "Result") -> None:
        """Give the result; called once, by the controller."""
        self._result = result
        self.is_done = True

    def fail(self, error: BaseException) -> None:
        """Give the error; called once, by the controller."""
        self._error = error
        self.is_done = True


class TensorHandle(Handle):
    """The handle of one tensor that is reduced in place: ``wait()`` returns it.

    There may be thousands in a step, so that it holds no more than it must.
    """

    __slots__ = ("recurring", "tensor")

    def __init__(self, controller: Drives, recurring: "Recurring", tensor: Tensor) -> None:
        """Begin.

        Args:
            controller: drives while somebody waits.
            recurring: what to do.
            tensor: with this.
        """
        self.name = recurring.name
        self.since = time.monotonic()
        self.is_done = False
        self._controller = controller
        self._error = None
        self.recurring = recurring
        self.tensor = tensor

    @property
    def request(self) -> "Request":
        """What is asked for."""
        assert self.recurring is not None
        return self.recurring.request(self.tensor)

    def wait(self) -> Tensor:  # type: ignore[override]
        """Return the tensor, or raise what went wrong; see ``Handle``."""
        if not self.is_done and self._controller is not None:
            self._controller.finish(self)
        if self._error is not None:
            raise self._error
        return self.tensor

    def succeed(self, result: "Result") -> None:  # noqa: ARG002 - it is here
        """Say that the result is in the tensor."""
        self.is_done = True


def tensors_of(handles: Sequence[Handle]) -> list[Tensor] | None:
    """Return the tensors of many handles; None where not all are ``TensorHandle``."""
    if set(map(type, handles)) != {TensorHandle}:
        return None
    return [handle.tensor for handle in handles]  # type: ignore[attr-defined]


def succeed_all(handles: Sequence[Handle], tensors: Sequence[Tensor]) -> None:
    """Give each of many handles its tensor."""
    for handle, tensor in zip(handles, tensors, strict=True):
        handle.succeed([tensor])


def succeed_in_place(handles: Sequence[Handle]) -> None:
    """Tell many ``TensorHandle`` that they are done: a call for each costs what its copy does."""
    for handle in handles:
        handle.is_done = True
