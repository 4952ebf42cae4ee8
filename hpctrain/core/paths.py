"""Conversion to absolute paths, done early because a program may change its directory later."""

import os
from pathlib import Path

from hpctrain.core.errors import ConfigError


def _current() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - loads nothing
    except OSError:  # the directory was removed
        return None


START = _current()
"""The current directory when this process imported ``hpctrain``; None if it did not exist."""


def absolute(path: str | os.PathLike[str], *, base: str | None = None) -> Path:
    """Return an absolute path, without resolving symbolic links and ``..``. Not collective.

    Args:
        path: a relative path starts at ``base``; ``""`` is ``base`` itself.
        base: absolute directory; None for the current directory.

    Raises:
        ConfigError: ``path`` is not a path, or is relative while the current directory does not
            exist.
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
        use = f" for the relative path {name!r}" if name else ""
        remedy = ", or give an absolute path" if name else ""
        raise ConfigError(
            f"the current directory must exist{use}, but was removed; change to another directory"
            f"{remedy}"
        )
    return Path(start, name)


def from_environment(text: str) -> Path:
    """Convert the text of an environment variable to a path; a relative path starts at ``START``.

    All ranks get the same path, even if the program has changed its directory. Raises
    ``ConfigError``: the text is empty, or the path is relative and ``START`` is None.
    """
    if not text:
        raise ConfigError(f"the name of a file or folder must not be empty, got {text!r}")
    return absolute(text, base=START)
