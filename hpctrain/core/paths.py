"""Absolute paths: paths are resolved when given, as a program may later change directory."""

import os
from pathlib import Path

from hpctrain.core.errors import ConfigError


def _current() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - loads nothing
    except OSError:  # it was removed
        return None


START = _current()
"""The directory in which this process imported ``hpctrain``; None if it was removed before."""


def absolute(path: str | os.PathLike[str], *, base: str | None = None) -> Path:
    """Return a path as an absolute one; symbolic links and ``..`` stay. Not collective.

    Args:
        path: a relative one starts at the current directory of this call, or at ``base``.
        base: an absolute directory; None for the current one.

    Raises:
        ConfigError: ``path`` is no path, or relative and there is no directory to start from.
    """
    try:
        name: object = os.fspath(path)
    except TypeError:
        name = None
    if not isinstance(name, str):
        raise ConfigError(
            f"a path must be a str or an os.PathLike of str, got {path!r}; use pathlib.Path"
        )
    if os.path.isabs(name):  # noqa: PTH117 - loads nothing
        return Path(name)
    if (start := base or _current()) is None:
        raise ConfigError(
            f"the relative path {name!r} needs a current directory, but that was removed; change "
            f"to another directory or give an absolute path"
        )
    return Path(start, name)


def from_environment(text: str) -> Path:
    """Return the path that a variable holds; a relative one starts at ``START``.

    All ranks read the same file, wherever the program changes its directory to before it reads
    the variable. Raises ``ConfigError``: the text is empty, or relative without ``START``.
    """
    if not text:
        raise ConfigError(f"the name of a file or folder must not be empty, got {text!r}")
    return absolute(text, base=START)
