"""Work of reading in line: threads do it in order, and the disk is asked for what comes next."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

from hpctrain.data.format.own import UNREADABLE

_THREADS = 2
"""One looks at what it has read while the other one waits for the disk."""
_SOON = 3
"""Pieces that the disk is asked for before they are read: enough to keep it busy meanwhile."""


class ReadPiece(NamedTuple):
    """Some bytes of a file."""

    read: Callable[[], None]
    """Brings them into memory, and handles whatever goes wrong."""
    ask: Callable[[], None] | None = None
    """Tells the disk to find them; None where it does so by itself, as a file is read on."""
    is_sweep: bool = False
    """Whether it does no more than wait for the disk, for many bytes."""


class Line:
    """Pieces on their way into memory, in threads of their own. Several threads may add some.

    Sweeps stand in a line of their own, so that nothing else keeps the disk waiting.
    """

    def __init__(self) -> None:
        """Start no thread yet."""
        self._waiting: deque[ReadPiece] = deque()
        self._num_asked = 0
        """Of the first ones that wait."""
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "hpctrain-ahead")
        self._sweeping = ThreadPoolExecutor(1, "hpctrain-sweep")

    def join(self, pieces: Iterable[ReadPiece]) -> None:
        """Add pieces at the end, and return at once; all of them will be read."""
        for piece in pieces:
            threads, work = self._sweeping, piece.read
            if not piece.is_sweep:
                with self._lock:
                    self._waiting.append(piece)
                threads, work = self._threads, self._read_next
            try:
                threads.submit(work)
            except RuntimeError:  # the interpreter ends; still, somebody may wait for it
                work()

    def _read_next(self) -> None:
        with self._lock:
            piece = self._waiting.popleft()
            self._num_asked = max(0, self._num_asked - 1)
            soon = []
            while self._num_asked < min(_SOON, len(self._waiting)):
                soon.append(self._waiting[self._num_asked])
                self._num_asked += 1
        try:
            for other in soon:
                if other.ask:
                    with suppress(*UNREADABLE):
                        other.ask()
        finally:
            piece.read()
