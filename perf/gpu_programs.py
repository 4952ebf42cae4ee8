"""Random training scripts on a GPU that ranks share, compared with torch on one rank.

    hpctrain launch -n 2 -- python perf/gpu_programs.py [NUM_SCRIPTS]

For ``gpu_check.py``. Scripts and their oracle are defined in ``tests/gradients``.
"""

import os
import sys
import time
from pathlib import Path

import gpu_device as here
from gpu_finding import Finding, reported_errors

os.environ["TEST_DEVICE"] = str(here.DEVICE)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpi4py import MPI

from tests.gradients.program_table import draw_program
from tests.gradients.test_programs import check

MOST_S = 25.0  # no script begins later


def main(most: int) -> Finding:
    """Run scripts until the requested number or the time limit is reached."""
    world, start, num = MPI.COMM_WORLD, time.monotonic(), 0
    wrong: dict[str, str] = {}
    while num < most and world.bcast(time.monotonic() - start) < MOST_S:
        kind, text = check(world, draw_program(num, world.size))
        if kind:
            wrong[f"script {num}: {kind}"] = text[:1000]
        num += 1
        if kind == "ranks differ":  # and are still in their world
            break
    says = f"{num - len(wrong)} of {num} scripts are right"
    return Finding("fail" if wrong else "pass", says, {"scripts": num, **wrong})


if __name__ == "__main__":
    with reported_errors():
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 40).write_on_rank_0()
