"""Handle of an operation that may still be under way."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpctrain.negotiation.request import Request, Result

if TYPE_CHECKING:
    from hpctrain.negotiation.controller import Controller

Take = Callable[[Result], Any]
"""Makes what the user gets of the result of a request."""


class Handle:
    """One operation of this rank: ask ``done()``, or ``wait()`` for its result."""

    __slots__ = ("_driver", "_error", "_result", "_take", "is_done", "name", "request", "since")

    def __init__(
        self,
        driver: "Controller | None",
        request: Request,
        name: str | None = None,
        take: Take | None = None,
    ) -> None:
        """Begin; without a ``driver``, which drives while somebody waits, nobody will."""
        self.request = request
        self.name = (request.name or "") if name is None else name
        self.since = time.monotonic()
        self.is_done = False
        self._driver = driver
        self._take = take
        self._result: Result | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Say whether ``wait()`` would return, or raise, at once."""
        if not self.is_done and self._driver is not None:
            self._driver.look()
        return self.is_done

    def wait(self) -> Any:
        """Return the result, or raise what went wrong; the caller's thread drives meanwhile.

        It may be called again.

        Raises:
            HorovodInternalError: the ranks disagree about this operation; on every rank.
            RankLostError: another rank died.
        """
        if not self.is_done and self._driver is not None:
            self._driver.finish(self)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result if self._take is None else self._take(self._result)

    def succeed(self, result: Result) -> None:
        """Give the result; called once, by the controller."""
        self._result = result
        self.is_done = True

    def fail(self, error: BaseException) -> None:
        """Give the error; called once, by the controller."""
        self._error = error
        self.is_done = True
