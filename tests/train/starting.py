"""Start ``hpctrain`` and scripts in separate processes, with or without mpirun."""

import subprocess
from pathlib import Path

from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.processes import ended

ROOT = Path(__file__).parents[2]
LIMIT_S = 360

CONFIG = """
name = "small"
[model]
target = "{target}"
[data]
target = "tests.train.problem:data"
args = {{ folder = "d" }}
[train]
epochs = {epochs}
global_batch = {batch}
[log]
every_steps = {every}
plots = {plots}
"""


def write_config(
    folder: Path, target: str, *, epochs: int, batch: int = 16, every: int = 1, plots: bool = False
) -> None:
    """Write ``small.toml``, the configuration of a run in other processes."""
    values = {"target": target, "epochs": epochs, "batch": batch, "every": every}
    text = CONFIG.format(**values, plots=str(plots).lower())
    (folder / "small.toml").write_text(text)


def start(
    *argv: str | Path, num_ranks: int | None = None, nodes: int | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a Python program; ``num_ranks=None`` starts one process without mpirun."""
    line = [*preload.python(), *map(str, argv)]
    if num_ranks is not None:
        line = mpiexec.command(line, num_ranks=num_ranks, nodes=nodes)
    return ended(
        line, timeout=LIMIT_S, env=mpiexec.environment() | {"PYTHONPATH": str(ROOT)}, cwd=cwd
    )


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1].strip()
