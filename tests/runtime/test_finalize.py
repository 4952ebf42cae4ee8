"""A program may call ``MPI_Finalize`` itself."""

import sys
from pathlib import Path

import pytest

from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.processes import ended

pytestmark = pytest.mark.launches

ROOT = Path(__file__).parents[2]
MPICH = ROOT / ".venv-mpich/bin/python"

PROGRAM = """
import sys, time
import torch
from mpi4py import MPI
import hpctrain as hvd

for again in range(2):
    hvd.shutdown()
    hvd.init()
    mean = hvd.allreduce(torch.full((4,), float(hvd.rank())))
if hvd.rank() == 1:
    time.sleep(1.2)  # the other ranks wait in Finalize
MPI.Finalize()
if hvd.rank() == 0:
    print("mean", mean[0].item(), "of", hvd.size())
try:
    hvd.allreduce(mean)
except hvd.HorovodInternalError as error:
    assert "shut down" in str(error), error
else:
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("python", "environment"),
    [
        pytest.param(Path(sys.executable), ".venv", id="this MPI"),
        pytest.param(MPICH, ".venv-mpich", id="MPICH", marks=pytest.mark.requires("mpich")),
    ],
)
def test_a_program_that_calls_finalize_itself_exits_with_0(python, environment, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks = [*preload.python(environment), program]
    line = [python, "-m", "hpctrain", "launch", "-n", "2", "--", *ranks]
    environ = mpiexec.environment() | {"PYTHONPATH": str(ROOT)}
    done = ended(line, env=environ)
    assert (done.returncode, done.stdout) == (0, "mean 0.5 of 2\n"), done.stderr
