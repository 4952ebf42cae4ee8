"""Commands as users write them: ``python``, ``hpctrain``, a script, a program."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.core.errors import LaunchError


def resolve(argv: Sequence[str]) -> list[str]:
    """Make a command one that ranks can run, wherever PATH leads there.

    A bare ``python`` or ``hpctrain`` is this environment's; a Python script runs under this
    interpreter.

    Raises:
        LaunchError: there is no command, or no such program or script.
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
            f"a command is `python x.py`, `hpctrain ...`, a script or a program, there is no "
            f"{first!r}; see `which {first}`"
        )
    return [program, *rest]
