"""Run programs of tests to their end, and wait for processes."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.harness.pace import scaled


def ended(
    line: Sequence[Any], *, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its exit code; capture its output as text.

    ``timeout`` is in seconds on an idle machine; slow machines get more.
    """
    return subprocess.run(
        [*map(str, line)],
        capture_output=True,
        text=True,
        check=False,
        timeout=None if timeout is None else scaled(timeout),
        **options,
    )


def hpctrain_without(modules: str, *words: Any) -> subprocess.CompletedProcess[str]:
    """Run ``hpctrain`` in a process in which imports of some modules fail."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({modules.split()}))\n"
        "from hpctrain.cli.main import main; main()"
    )
    return ended([sys.executable, "-c", code, *words])


AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Lets Open MPI's launcher start for the user of a container; elsewhere it changes nothing."""


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Return True if ``condition`` became true within ``limit_s``, scaled on slow machines."""
    start = time.monotonic()
    while not (met := condition()):
        waited_s = time.monotonic() - start
        if waited_s > limit_s and waited_s > scaled(limit_s):
            break
        time.sleep(0.02)
    return met


def is_alive(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
