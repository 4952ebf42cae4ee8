"""Operations drawn at random give what numpy gives, by every path; the same bits on all ranks."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.comm.fuzz import fuzz

ROOT = Path(__file__).parents[2]
NUM_CASES = 1000
"""By each of five paths; ``python -m tests.comm.fuzz -n N --seed S`` on any ranks for more."""


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.limit(120)
def test_random_collectives_equal_numpy(world, comm):
    fuzz(comm, NUM_CASES, seed=world.size)


@pytest.mark.launches
@pytest.mark.requires("mpich")
@pytest.mark.limit(120)
def test_random_collectives_equal_numpy_under_mpich_on_two_nodes():
    python = ROOT / ".venv-mpich/bin/python"
    command = [python, "-m", "hpctrain", "launch", "-n", "4", "--nodes", "2", "--"]
    done = subprocess.run(
        [*command, python, "-m", "tests.comm.fuzz", "-n", str(NUM_CASES)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "4 ranks on 2 nodes agree with numpy" in done.stdout
