"""Training scripts drawn at random, on a card that ranks share, against plain torch alone.

    hpctrain launch -n 2 -- python perf/gpu_programs.py [HOW MANY]

For ``gpu_check.py``. What a script is, and what its oracle, is in ``tests/gradients``.
"""

import os
import sys
import time
from pathlib import Path

import gpu_device as here
from gpu_finding import Finding, errors_told

os.environ["HPCTRAIN_TEST_DEVICE"] = str(here.DEVICE)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpi4py import MPI

from tests.gradients.program_table import draw_program
from tests.gradients.test_programs import check

MOST_S = 40.0  # no script begins later


def main(most: int) -> Finding:
    """Carry scripts out until there are enough, or the time is over."""
    world, start, num = MPI.COMM_WORLD, time.monotonic(), 0
    while num < most and world.bcast(time.monotonic() - start) < MOST_S:
        program = draw_program(num, world.size)
        kind, said = check(world, program)
        if kind:
            return Finding("fail", f"script {num}: {kind}", {"said": said[:2000]})
        num += 1
    return Finding("pass", f"{num} scripts are right", {"scripts": num})


if __name__ == "__main__":
    with errors_told():
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 40).tell()
