"""Names that Python 3.10 lacks or has in another module; state of the garbage collector."""

import gc
import sys
from functools import cache

__all__ = ["Self", "Traversable", "add_note", "collection", "tomllib"]

if sys.version_info >= (3, 11):
    from importlib.resources.abc import Traversable
    from typing import Self

    import tomllib
else:
    from importlib.abc import Traversable

    import tomli as tomllib
    from typing_extensions import Self


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error. Python 3.10 stores the note but does not print it."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


class GarbageCollection:
    """Records whether the garbage collector of this process is running.

    The collector may interrupt any statement of any thread to call finalizers. Such a finalizer
    must not wait for other threads: up to Python 3.12, the interrupted statement may hold a lock
    of the module ``threading`` that another thread needs before it can end.
    """

    def __init__(self) -> None:
        self.is_running = False
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: object) -> None:
        self.is_running = phase == "start"


@cache
def collection() -> GarbageCollection:
    """Return the recorder of the garbage collector's state; the first call starts recording.

    Modules whose finalizers need the state call this function at import. Other programs do not
    record the state, because Python ignores a ``KeyboardInterrupt`` in the recorder's callback.
    """
    return GarbageCollection()
