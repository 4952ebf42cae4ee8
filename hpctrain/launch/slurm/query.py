"""Run a program for what it says."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

Said = subprocess.CompletedProcess[str]
"""What it has written, and its exit code."""


def ask(
    line: Sequence[str | Path],
    environ: Mapping[str, str] | None = None,
    *,
    text: str = "",
    timeout_s: float,
) -> Said:
    """Run a program to its end, whatever its exit code.

    Args:
        line: its path and its arguments.
        environ: its environment; None for this process's.
        text: its standard input.
        timeout_s: time that it gets.

    Raises:
        OSError: it cannot be run; ``TimeoutError`` where it does not end in time.
    """
    try:
        return subprocess.run(  # noqa: S603 - whoever asks names a program of the user's own
            line,
            check=False,
            capture_output=True,
            env=None if environ is None else dict(environ),
            input=text,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(str(error)) from None
