"""Run small failing programs on real ranks, and collect their outcome."""

import contextlib
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hpctrain
from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.harness.pace import scaled, slowness
from tests.processes import is_alive, wait_until

START_LIMIT_S = 90.0
"""Time for imports and init on a loaded machine; measurements start at the failure."""

PREAMBLE = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
import hpctrain as hvd

HERE = Path(__file__).parent
hvd.init()
rank, size = hvd.rank(), hvd.size()
(HERE / f"pid-{rank}").write_text(str(os.getpid()))
hvd.barrier()

def now():
    "Record the time of the failure."
    (HERE / "failed_at").write_text(str(time.time()))

def train(steps=10**9, pause_s=0.01):
    "Train, as the ranks that have not failed."
    for step in range(steps):
        hvd.allreduce_(torch.ones(1000))
        time.sleep(pause_s)

"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of a launch."""

    code: int
    out: str
    err: str
    seconds: float
    """Time from the failure, as recorded by the failing rank, until mpirun and all ranks have
    exited, divided by ``slowness()``."""
    left_over: list[int]  # ranks whose process survived mpirun
    logs: dict[int, str]  # lines of each rank in the log files


def run_ranks(
    folder: Path,
    body: str,
    *,
    num_ranks: int = 2,
    nodes: int | None = None,
    disturb: Callable[[subprocess.Popen[str]], None] | None = None,
) -> Outcome:
    """Run ``PREAMBLE`` and ``body`` on ``num_ranks`` ranks.

    Args:
        folder: folder of the program, its output and its logs.
        body: code after ``hpctrain.init()``.
        disturb: called with mpirun's process half a second after all ranks have passed ``init``.
    """
    script = folder / "victim.py"
    script.write_text(PREAMBLE + textwrap.dedent(body))
    source = str(Path(hpctrain.__file__).parents[1])
    environ = mpiexec.environment() | {
        "PYTHONPATH": source,
        "HPCTRAIN_LOG_DIR": str(folder / "log"),
        "OMP_NUM_THREADS": "1",
    }
    line = mpiexec.command([*preload.python(), str(script)], num_ranks=num_ranks, nodes=nodes)
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        mpirun = subprocess.Popen(
            line, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True
        )
    try:
        if disturb:
            wait_until(lambda: len(_pids(folder)) == num_ranks, START_LIMIT_S)
            time.sleep(0.5)
            (folder / "failed_at").write_text(str(time.time()))
            disturb(mpirun)
        mpirun.wait(scaled(START_LIMIT_S))
    finally:
        pids = _pids(folder)
        left_over = [rank for rank, pid in pids.items() if not _gone_within(pid, 2.0)]
        ended_at = time.time()
        for pid in (*pids.values(), mpirun.pid):
            if mpirun.poll() is None or left_over:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        mpirun.wait()
    failed_at = folder / "failed_at"
    elapsed_s = ended_at - float(failed_at.read_text()) if failed_at.exists() else 0.0
    return Outcome(
        code=mpirun.returncode,
        out=(folder / "out").read_text(),
        err=(folder / "err").read_text(),
        seconds=elapsed_s / slowness(),
        left_over=left_over,
        logs=_logs(folder / "log"),
    )


def _logs(folder: Path) -> dict[int, str]:
    """Return the lines of each rank in the log files, with their tags."""
    found: dict[int, str] = {}
    for line in "".join(file.read_text() for file in folder.glob("*.log")).splitlines():
        if line.startswith("[rank "):  # unless the warning is of all ranks
            rank = int(line.removeprefix("[rank ").partition("]")[0])
            found[rank] = found.get(rank, "") + line + "\n"
    return found


def _gone_within(pid: int, limit_s: float) -> bool:
    return wait_until(lambda: not is_alive(pid), limit_s)


def _pids(folder: Path) -> dict[int, int]:
    texts = {int(p.name[4:]): p.read_text() for p in folder.glob("pid-*")}
    return {rank: int(text) for rank, text in texts.items() if text}
