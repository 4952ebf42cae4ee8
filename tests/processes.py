"""Programs that tests run to their end."""

import subprocess
from collections.abc import Sequence
from typing import Any


def ended(line: Sequence[Any], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its exit code; what it prints is text."""
    return subprocess.run([*map(str, line)], capture_output=True, text=True, check=False, **how)
