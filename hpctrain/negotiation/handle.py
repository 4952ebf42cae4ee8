"""Handles of operations that may still be under way, and their names."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from hpctrain.core.errors import DuplicateNameError
from hpctrain.negotiation.request import Kind, Request, Result

if TYPE_CHECKING:
    from hpctrain.negotiation.controller import Controller

NUM_UNNAMED = 1024
"""Operations without a name get numbers, which come again so that they become known ones."""

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
        """Begin.

        Args:
            driver: drives while somebody waits; None where nobody will.
            request: what is asked for.
            name: by which the ranks find each other's requests; None for that of the request.
            take: makes what ``wait`` returns of the result; None for the result itself.
        """
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
        """Start with none."""
        self._lock = threading.Lock()
        self._handles: dict[str, Handle] = {}
        self._unnamed = {kind: count() for kind in Kind}
        self._behind: defaultdict[str, deque[Handle]] = defaultdict(deque)
        self.num_behind = 0
        """Operations that wait for their name."""

    @property
    def num_outstanding(self) -> int:
        """Operations that are under way."""
        return len(self._handles)

    def enter(self, handle: Handle) -> bool:
        """Note an operation, and give it a name if it has none.

        Returns:
            False where it has to wait for an earlier one without a name, see ``leave``.

        Raises:
            DuplicateNameError: an operation of this name is under way.
        """
        if not handle.name:
            with self._lock:
                kind = handle.request.kind
                handle.name = f"{kind.value}.noname.{next(self._unnamed[kind]) % NUM_UNNAMED}"
                if handle.name in self._handles:
                    self._behind[handle.name].append(handle)
                    self.num_behind += 1
                    return False
                self._handles[handle.name] = handle
                return True
        if self._handles.setdefault(handle.name, handle) is not handle:
            raise DuplicateNameError(
                f"an operation named {handle.name!r} is under way on this rank already; wait for "
                f"it first, or give another name"
            )
        return True

    def leave(self, names: Sequence[str]) -> tuple[list[Handle | None], list[Handle]]:
        """Forget operations.

        Returns:
            The one of each name, None where there is none; and those that have waited for
            one of the names, which are under way from now on.
        """
        successors: list[Handle] = []
        with self._lock:
            handles = [self._handles.pop(name, None) for name in names]
            for name in self._behind.keys() & names if self._behind else ():
                queue = self._behind[name]
                self._handles[name] = queue.popleft()
                successors.append(self._handles[name])
                self.num_behind -= 1
                if not queue:
                    del self._behind[name]
        return handles, successors

    def restart(self) -> None:
        """Number operations without a name from 0 again; for a moment at which all ranks do."""
        self._unnamed = {kind: count() for kind in Kind}

    def oldest(self) -> dict[str, float]:
        """Return since when each operation is under way, by name, as ``time.monotonic`` says."""
        return {handle.name: handle.since for handle in list(self._handles.values())}

    def clear(self) -> list[Handle]:
        """Forget all operations, and return them."""
        with self._lock:
            found = [*self._handles.values(), *(h for q in self._behind.values() for h in q)]
            self._handles.clear()
            self._behind.clear()
            self.num_behind = 0
        return found
