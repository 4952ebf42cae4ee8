"""A finding of a check about a machine, a launch or a script, and the remedy."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]

LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
"""Levels in order of severity; ``warning`` and ``error`` make the exit code of a check 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check; a check without problems returns one result of level ``ok``."""

    check: str
    """Name of the check in two or three words, the same for all findings of the check."""
    level: Level
    """``ok``; ``note``: good to know; ``warning``: slow or risky; ``error``: will fail."""
    what: str  # the finding, with its values
    do: str = ""  # the command or setting that fixes it; empty only if nothing is wrong

    @property
    def is_wrong(self) -> bool:
        """Return True if the finding is a warning or an error, which the user has to fix."""
        return self.level in ("warning", "error")
