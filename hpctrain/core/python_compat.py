"""Names of the standard library that Python 3.10 lacks or has in another module."""

import sys

__all__ = ["Self", "Traversable", "add_note", "tomllib"]

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
