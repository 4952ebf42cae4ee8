"""Every wait for another rank has a time limit, from ``MPI_Init`` to ``MPI_Finalize``."""

import sys

import pytest

from hpctrain.cluster.env import RANK_LOST
from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.harness.pace import scaled
from tests.processes import ended
from tests.train.starting import ROOT

pytestmark = [pytest.mark.launches, pytest.mark.limit(90)]

PROGRAM = """
import os, signal, sys, time
import torch
import hpctrain as hvd

hvd.init()
hvd.allreduce_(torch.ones(3))
if hvd.rank() == 0:
    print("test accuracy 0.9")
if hvd.rank() == hvd.size() - 1:
    os.kill(os.getpid(), signal.SIGSTOP) if sys.argv[1] == "stops" else time.sleep(60)
"""


def run(program, num_ranks, *words, options=(), python=None):
    limits = {"HPCTRAIN_TIMEOUT": f"{scaled(3):.0f}"}
    line = [*preload.python(), "-m", "hpctrain", "launch", "-n", num_ranks, *options, "--"]
    return ended(
        [*line, *(python or preload.python()), "-c", program, *words],
        timeout=60,
        env=mpiexec.environment() | {"PYTHONPATH": str(ROOT)} | limits,
    )


RECOVERS = (("--recover",), pytest.mark.requires("recovery"))


@pytest.mark.parametrize(
    ("num_ranks", "what", "options"),
    [
        pytest.param(2, "sleeps", (), id="sleeps"),
        pytest.param(3, "stops", RECOVERS[0], marks=RECOVERS[1], id="stops, recover"),
        pytest.param(4, "stops", (), marks=pytest.mark.conformance, id="stops"),
        pytest.param(
            *(2, "sleeps", RECOVERS[0]),
            marks=[RECOVERS[1], pytest.mark.conformance],
            id="sleeps, recover",
        ),
    ],
)
def test_shutdown_ends_after_the_timeout_and_names_the_missing_rank(num_ranks, what, options):
    done = run(PROGRAM, num_ranks, what, options=options)
    assert done.returncode == RANK_LOST, done.stderr
    assert done.stdout == "test accuracy 0.9\n"
    last = num_ranks - 1
    assert f"but rank 0 has waited that long for rank {last}" in done.stderr
    assert (f"rank {last} of this node stopped by a signal" in done.stderr) == (what == "stops")


EXITS = """
import os, sys
import hpctrain as hvd

hvd.init()
if hvd.rank() == hvd.size() - 1 or sys.argv[1] == "all":
    os._exit(int(sys.argv[2]))
hvd.barrier()
"""


@pytest.mark.parametrize(
    ("num_ranks", "which", "code", "expected"),
    [
        (2, "last", 0, RANK_LOST),
        (3, "all", 0, RANK_LOST),
        pytest.param(3, "last", 0, RANK_LOST, marks=pytest.mark.conformance),
        pytest.param(2, "all", 3, 3, marks=pytest.mark.conformance),
    ],
)
def test_a_rank_that_exits_without_shutdown_is_lost(num_ranks, which, code, expected):
    done = run(EXITS, num_ranks, which, code, python=[sys.executable])
    assert done.returncode == expected, done.stderr


IN_MPI = """
import atexit, os, signal, sys
def stop():
    os.environ["OMPI_COMM_WORLD_RANK"] == "1" and os.kill(os.getpid(), signal.SIGSTOP)
stop() if sys.argv[1] == "MPI_Init" else atexit.register(stop)
from hpctrain.comm.mpi_world import find_world
find_world()
print("done")
"""


@pytest.mark.parametrize("call", ["MPI_Init", "MPI_Finalize"])
def test_a_hang_in_mpi_init_or_finalize_ends_the_launch_after_the_timeout(call):
    done = run(IN_MPI, 3, call, python=[sys.executable])
    assert done.returncode == RANK_LOST, done.stderr
    assert f"has waited longer in {call} for rank 1; all ranks are killed" in done.stderr
    assert done.stdout == "done\n" * 3 * (call == "MPI_Finalize")


START = """
import os, signal
import hpctrain as hvd
from hpctrain.comm.mpi_start import MPI

MPI.COMM_WORLD.rank == 1 and os.kill(os.getpid(), signal.SIGSTOP)
hvd.init()
"""
SPARES = pytest.param(
    ("--recover", "--spares", 1),
    marks=[pytest.mark.requires("recovery"), pytest.mark.conformance],
    id="spares",
)


@pytest.mark.parametrize("options", [pytest.param((), id="plain"), SPARES])
def test_a_rank_that_does_not_reach_init_ends_all(options):
    done = run(START, 2, options=options, python=[sys.executable])
    assert done.returncode == RANK_LOST, done.stderr
    assert "a wait for other ranks must end within HPCTRAIN_TIMEOUT=" in done.stderr
    assert "MPI_Finalize" not in done.stderr


DOCTOR = """
import os, signal, sys
from hpctrain.cli.main import main
from hpctrain.comm.mpi_start import MPI

MPI.COMM_WORLD.rank == 1 and os.kill(os.getpid(), signal.SIGSTOP)
sys.argv = ["hpctrain", "doctor"]
main()
"""


def test_a_rank_that_does_not_join_the_doctor_ends_all_ranks():
    done = run(DOCTOR, 2, python=[sys.executable])
    assert done.returncode == RANK_LOST, done.stderr
    assert "a wait for other ranks must end within HPCTRAIN_TIMEOUT=" in done.stderr
