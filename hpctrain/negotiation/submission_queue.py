"""``SubmissionQueue``, which orders the operations that this rank announces."""

import threading
from collections import defaultdict, deque
from itertools import count

from hpctrain.core.errors import DuplicateNameError
from hpctrain.negotiation.request import Handle, Kind

JOIN = "<join>"  # name of handles that wait until all ranks have joined
CLOSE = "<close>"  # name of the final operation
NUM_UNNAMED = 1024
"""Operations without a name get numbers modulo this value, so that the names repeat and are
cached. A later operation of the same number is held until the earlier one is complete."""


class SubmissionQueue:
    """Stores the operations of this rank in flight, at most one of each name. Thread-safe.

    Operations of one name are announced in the order of the calls of ``enter``. ``enter`` assigns
    a name, with kind and number, to an operation without a name. A join or close is announced
    after all operations that were entered before it.
    """

    def __init__(self) -> None:
        self.submitted: deque[Handle] = deque()  # submitted, not announced
        self.in_flight: dict[str, Handle] = {}  # by name, without joins
        self.joining: list[Handle] = []  # announced joins; the driver of the engine adds them
        self.held = deque[Handle]()
        """Operations whose number is in flight, oldest first, and the join or close after them."""
        self._unnamed = defaultdict[Kind, "count[int]"](count)
        self._numbering = threading.RLock()

    def enter(self, handle: Handle) -> None:
        """Add an operation; assign a name to an operation without a name.

        Raises:
            DuplicateNameError: an operation of this user-defined name is in flight.
        """
        if handle.name and handle.name is not JOIN and handle.name is not CLOSE:
            if self.in_flight.setdefault(handle.name, handle) is not handle:
                raise DuplicateNameError(
                    f"operations in flight must have different names, but {handle.name!r} is "
                    f"already in flight on this rank; wait for it first, or use another name"
                )
            self.submitted.append(handle)
            return
        with self._numbering:
            if not handle.name:
                kind = handle.request.kind
                handle.name = f"{kind.value}.noname.{next(self._unnamed[kind]) % NUM_UNNAMED}"
            self.held.append(handle)
            if len(self.held) == 1 or handle.name not in self.in_flight:
                self.submit_held()

    def submit_held(self) -> None:
        """Submit each held operation unless an operation in flight has the same name."""
        if not self.held:
            return
        with self._numbering:
            held, self.held = self.held, deque()
            names = set[str]()
            for handle in held:
                name = handle.name
                is_last = name is JOIN or name is CLOSE
                if name in names or (is_last and self.held):
                    self.held.append(handle)
                elif name is JOIN or self.in_flight.setdefault(name, handle) is handle:
                    self.submitted.append(handle)
                else:
                    self.held.append(handle)
                    names.add(name)

    def end_join(self) -> list[Handle]:
        """Remove and return the complete joins, and restart the numbers of unnamed operations.

        Ranks that had joined have not counted the operations of the other ranks.
        """
        self._unnamed.clear()
        joined, self.joining = self.joining, []
        return joined

    @property
    def is_awaited(self) -> bool:
        """Whether an operation or a join is in flight."""
        return bool(self.in_flight or self.joining)

    def oldest(self) -> dict[str, float]:
        """Return when each operation in flight was submitted, as ``time.monotonic()`` by name."""
        return {handle.name: handle.since for handle in list(self.in_flight.values())}

    def take_all(self) -> list[Handle]:
        """Remove and return all operations."""
        joining, self.joining = self.joining, []
        with self._numbering:
            held, self.held = self.held, deque()
        submitted = [self.submitted.popleft() for _ in range(len(self.submitted))]
        in_flight = [self.in_flight.popitem()[1] for _ in range(len(self.in_flight))]
        return [*in_flight, *submitted, *joining, *held]
