"""Check messages where the kernel denies ranks access to each other's memory."""

import json
import sys
from pathlib import Path

import pytest

from hpctrain.cluster.env import COPIES_OFF
from hpctrain.cluster.libraries import copies_off
from hpctrain.launch import mpiexec
from tests.processes import ended

pytestmark = pytest.mark.launches

ROOT = Path(__file__).parents[2]
REFUSED = [sys.executable, ROOT / "tests/doctor/refuse.py", "process_vm_readv", "EPERM"]
MPICH = ROOT / ".venv-mpich/bin"

OF_MPI = """
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
for number in (10, 1 << 20):
    mine, other = np.full(number, comm.rank), np.empty(number, int)
    comm.Sendrecv(mine, 1 - comm.rank, 0, other, 1 - comm.rank, 0)
    assert (other == 1 - comm.rank).all()
"""

OF_RANKS = """
import torch
import hpctrain as hvd

hvd.init()
for number in (10, 1 << 20):
    parts = hvd.alltoall(torch.full((number,), hvd.rank()))
    assert torch.equal(parts, torch.arange(2).repeat_interleave(number // 2))
"""


@pytest.mark.requires("mpich")
@pytest.mark.parametrize(
    ("launcher", "text"),
    [
        (["python", "-m", "hpctrain", "launch", "-n", "2", "--"], OF_MPI),
        (["mpirun", "-n", "2"], OF_RANKS),
    ],
    ids=["launch", "mpirun"],
)
def test_mpich_sends_large_messages(launcher, text, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(text)
    environ = mpiexec.environment() | {"PYTHONPATH": str(ROOT)}
    start = [MPICH / launcher[0], *launcher[1:]]
    done = ended([*REFUSED, *start, MPICH / "python", program], env=environ)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("chosen", [{}, dict.fromkeys(COPIES_OFF, "mine")])
def test_settings_are_changed_only_if_the_kernel_refuses_and_they_are_unset(chosen):
    assert copies_off({}) == {}
    code = "import json; from hpctrain.cluster.libraries import *; print(json.dumps(copies_off()))"
    environ = mpiexec.environment() | {"PYTHONPATH": str(ROOT)} | chosen
    done = ended([*REFUSED, sys.executable, "-c", code], env=environ)
    assert json.loads(done.stdout) == ({} if chosen else COPIES_OFF), done.stderr
