"""Resolution of user commands, start of programs, and signal handlers while programs run."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hpctrain.cluster.libraries import missing_home
from hpctrain.core.errors import LaunchError

CompletedProgram = subprocess.CompletedProcess[str]  # output and exit code of a program


def resolve(argv: Sequence[str]) -> list[str]:
    """Return a command line that ranks can run with any PATH.

    The words ``python`` and ``hpctrain`` are replaced by the paths of the programs of this
    environment. A Python script runs with this interpreter.

    Args:
        argv: command line of a user.

    Raises:
        LaunchError: the command line is empty, or its program does not exist.
    """
    if not argv:
        raise LaunchError(
            "a launch must have a command, got none; add one, such as `python train.py`"
        )
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
    """Return a copy of an environment with ``HOME``, which Open MPI programs require."""
    return {**missing_home(environ), **environ}


def run_to_end(
    line: Sequence[str | Path],
    environ: Mapping[str, str] | None = None,
    *,
    text: str = "",
    timeout_s: float,
) -> CompletedProgram:
    """Run a program to its end with the standard input ``text``, and return output and exit code.

    Raises:
        OSError: the program cannot be started.
        TimeoutError: the program runs longer than ``timeout_s``.
    """
    try:
        return subprocess.run(  # noqa: S603 - a program of the user
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


def start(line: Sequence[str | Path], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in its own session, with options of ``subprocess.Popen``."""
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
    return subprocess.Popen(line, **options)  # noqa: S603 - a program of the user


@contextmanager
def handling(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Call ``handler`` for the signals ``numbers`` in the block; no-op outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    # nohup, or `&` in a shell, makes a process ignore some signals; these signals stay ignored.
    taken = [number for number, old in before.items() if old not in (signal.SIG_IGN, None)]
    for number in taken:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
