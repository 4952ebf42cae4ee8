"""Handles of operations that may still be under way, and their names."""

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from hpctrain.core.errors import DuplicateNameError
from hpctrain.negotiation.request import Kind, Request, Result

if TYPE_CHECKING:
    from hpctrain.negotiation.progress_thread import ProgressThread

NUM_UNNAMED = 1024
"""Operations without a name get numbers, which come again so that they become known ones; so many
may be under way at once."""

Take = Callable[[Result], Any]
"""Makes what the user gets of the result of a request."""


class Handle:
    """One operation of this rank: ask ``done()``, or ``wait()`` for its result."""

    __slots__ = ("_driver", "_error", "_result", "_take", "is_done", "name", "request", "since")

    def __init__(
        self,
        driver: "ProgressThread | None",
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


class Names:
    """The operations under way, by name. Several threads may use it at once."""

    def __init__(self) -> None:
        self._handles: dict[str, Handle] = {}
        self._unnamed = {kind: count() for kind in Kind}

    @property
    def num_outstanding(self) -> int:
        """Operations that are under way."""
        return len(self._handles)

    def enter(self, handle: Handle) -> Handle | None:
        """Note an operation, and give it a name if it has none.

        Returns:
            Where that name comes again too early, the one to wait for before the next attempt.

        Raises:
            DuplicateNameError: an operation of this name, which the user gave, is under way.
        """
        if not handle.name:
            kind = handle.request.kind
            handle.name = f"{kind.value}.noname.{next(self._unnamed[kind]) % NUM_UNNAMED}"
        other = self._handles.setdefault(handle.name, handle)
        if other is handle:
            return None
        if handle.request.name is None:
            return other
        raise DuplicateNameError(
            f"an operation named {handle.name!r} is under way on this rank already; wait for it "
            f"first, or give another name"
        )

    def leave(self, names: Sequence[str]) -> list[Handle | None]:
        """Forget operations; return the one of each name, None where there is none."""
        return [self._handles.pop(name, None) for name in names]

    def restart(self) -> None:
        """Number operations without a name from 0 again; for a moment at which all ranks do."""
        self._unnamed = {kind: count() for kind in Kind}

    def oldest(self) -> dict[str, float]:
        """Return since when each operation is under way, by name, as ``time.monotonic`` says."""
        return {handle.name: handle.since for handle in list(self._handles.values())}

    def clear(self) -> list[Handle]:
        """Forget all operations, and return them."""
        return [self._handles.popitem()[1] for _ in range(len(self._handles))]
