"""Handles of operations that may still be under way."""

from concurrent.futures import Future
from typing import Protocol


class Work(Protocol):
    """An operation that was started; on CPU its result may be read after ``wait()``."""

    def wait(self) -> None:
        """Return when the result is there; raise what the operation raised."""

    def done(self) -> bool:
        """Say whether ``wait()`` would return at once."""


class Finished:
    """The work of an operation that was complete when it returned."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Say yes."""
        return True


FINISHED = Finished()


class ThreadWork:
    """An operation that a communication thread carries out."""

    def __init__(self, future: Future[None]) -> None:
        self.is_awaited = False
        """Whether somebody has called ``wait()``, who then knows of an error."""
        self._future = future

    def wait(self) -> None:
        """Block until the thread has carried it out."""
        self.is_awaited = True
        self._future.result()

    def error(self) -> BaseException | None:
        """Block until the thread has carried it out; return its error."""
        return self._future.exception()

    def done(self) -> bool:
        """Say whether the thread has carried it out."""
        return self._future.done()
