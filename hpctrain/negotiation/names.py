"""Names of this rank's operations under way."""

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import count

from hpctrain.core.errors import DuplicateNameError
from hpctrain.negotiation.handle import Handle
from hpctrain.negotiation.request import Kind

NUM_UNNAMED = 1024
"""Operations without a name get numbers, which come again so that they become known ones."""


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

    def leave(self, name: str) -> tuple[Handle | None, Handle | None]:
        """Forget the operation of this name.

        Returns:
            It, None where there is none; and the one that has waited for its name, which is
            under way from now on.
        """
        with self._lock:
            handle, queue = self._handles.pop(name, None), self._behind.get(name)
            if not queue:
                return handle, None
            self._handles[name] = successor = queue.popleft()
            self.num_behind -= 1
            if not queue:
                del self._behind[name]
            return handle, successor

    def leave_all(self, names: Sequence[str]) -> list[Handle] | None:
        """Do ``leave`` for many; None, and nothing done, where that is not so simple.

        Simple is: all of them are there, and nothing waits for a name.
        """
        handles = self._handles
        with self._lock:
            if self._behind or not all(map(handles.__contains__, names)):
                return None
            return list(map(handles.pop, names))

    def restart(self) -> None:
        """Number operations without a name from 0 again; for a moment at which all ranks do."""
        self._unnamed = {kind: count() for kind in Kind}

    def oldest(self) -> dict[str, float]:
        """Return since when each operation is under way, by name, as ``time.monotonic`` says."""
        return {handle.name: handle.since for handle in list(self._handles.values())}

    def clear(self) -> Iterator[Handle]:
        """Forget all operations, and yield them."""
        with self._lock:
            found = [*self._handles.values(), *(h for q in self._behind.values() for h in q)]
            self._handles.clear()
            self._behind.clear()
            self.num_behind = 0
        return iter(found)
