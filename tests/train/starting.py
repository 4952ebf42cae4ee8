"""Start ``hpctrain`` and scripts in processes of their own, with or without mpirun."""

import subprocess
from pathlib import Path

from hpctrain.launch import mpiexec
from tests.harness import preload

ROOT = Path(__file__).parents[2]
LIMIT_S = 360


def start(
    *argv: str | Path, num_ranks: int | None = None, nodes: int | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a Python program; ``num_ranks`` None starts one process without mpirun."""
    line = [*preload.python(), *map(str, argv)]
    if num_ranks is not None:
        line = mpiexec.command(line, num_ranks=num_ranks, nodes=nodes)
    return subprocess.run(
        line,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env=mpiexec.environment() | {"PYTHONPATH": str(ROOT)},
        cwd=cwd,
    )


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1].strip()
