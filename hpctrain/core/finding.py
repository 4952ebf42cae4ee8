"""A finding of a check about a machine, a launch or a script, and the remedy."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]

LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
"""From harmless to fatal; ``warning`` and ``error`` make the exit code of a check 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check; every check gives at least one, an ``ok`` where all is well."""

    check: str
    """Which check this is, in two or three words: the same word for its ``ok`` and its errors."""
    level: Level
    """``ok``; ``note``: good to know; ``warning``: slow or risky; ``error``: will fail."""
    what: str  # what was found, with its values
    do: str = ""  # the command or setting that mends it; empty only where nothing is wrong

    @property
    def is_wrong(self) -> bool:
        """Say whether somebody has to do something."""
        return self.level in ("warning", "error")
