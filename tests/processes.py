"""Programs that tests run to their end."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def ended(line: Sequence[Any], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its exit code; what it prints is text."""
    return subprocess.run([*map(str, line)], capture_output=True, text=True, check=False, **how)


def hpctrain_without(modules: str, *words: Any) -> subprocess.CompletedProcess[str]:
    """Run ``hpctrain`` where the import of some modules fails."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({modules.split()}))\n"
        "from hpctrain.cli.main import main; main()"
    )
    return ended([sys.executable, "-c", code, *words])
