"""Start programs on ranks of their own, with or without mpirun."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.launch import mpiexec

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


def start(
    *argv: str | Path, num_ranks: int | None = None, nodes: int | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a Python program; ``num_ranks`` None starts one process without mpirun."""
    line: Sequence[str] = [sys.executable, *map(str, argv)]
    environ = mpiexec.environment()
    environ["PYTHONPATH"] = str(ROOT)
    if num_ranks is not None:
        line = mpiexec.command(line, num_ranks=num_ranks, nodes=nodes)
        environ = {**mpiexec.environment(environ, num_ranks=num_ranks, nodes=nodes)}
    environ = {**environ, "OMP_NUM_THREADS": "1"} if "OMP_NUM_THREADS" not in os.environ else environ
    return subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=environ, cwd=cwd
    )


def last_line(text: str) -> str:
    """The last line that a person sees."""
    return text.rstrip().splitlines()[-1].strip()
