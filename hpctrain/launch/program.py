"""Programs: commands as users write them, and commands run for what they print."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.cluster.libraries import missing_home
from hpctrain.core.errors import LaunchError

Said = subprocess.CompletedProcess[str]  # what a program has written, and its exit code


def resolve(argv: Sequence[str]) -> list[str]:
    """Make a command one that ranks can run, wherever PATH leads there.

    A bare ``python`` or ``hpctrain`` is this environment's; a Python script runs under this
    interpreter. Raises ``LaunchError``: there is no command, or no such program or script.
    """
    if not argv:
        raise LaunchError("a launch needs a command, got none; say e.g. `python train.py`")
    first, *rest = argv
    if first in ("python", "python3"):
        return [sys.executable, *rest]
    if first == "hpctrain":
        return [sys.executable, "-m", "hpctrain", *rest]
    script = Path(first)
    if script.suffix == ".py" and script.is_file():
        return [sys.executable, first, *rest]
    program = shutil.which(first)
    if program is None:
        raise LaunchError(
            f"the command must be `python FILE.py`, `hpctrain ...`, a script or a program on "
            f"PATH, got {first!r}; check the spelling, or give the path of the program"
        )
    return [program, *rest]


def with_home(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Copy an environment, with ``HOME``, without which Open MPI's programs do not start."""
    return {**missing_home(environ), **environ}


def ask(
    line: Sequence[str | Path],
    environ: Mapping[str, str] | None = None,
    *,
    text: str = "",
    timeout_s: float,
) -> Said:
    """Run a program to its end, whatever its exit code; ``text`` is its standard input.

    Raises ``OSError``: it cannot be run; ``TimeoutError`` where it does not end in time.
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
