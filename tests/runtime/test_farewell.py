"""No rank waits at the end of the program without a limit, and the result is printed before."""

import pytest

from hpctrain.cluster.env import RANK_LOST
from hpctrain.launch import mpiexec
from tests.harness import preload
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


def run(program, num_ranks, *words, options=()):
    line = [*preload.python(), "-m", "hpctrain", "launch", "-n", num_ranks, *options, "--"]
    return ended(
        [*line, *preload.python(), "-c", program, *words],
        timeout=60,
        env=mpiexec.environment() | {"PYTHONPATH": str(ROOT), "HPCTRAIN_TIMEOUT": "3"},
    )


RECOVERS = pytest.param(("--recover",), marks=pytest.mark.requires("recovery"), id="recover")


@pytest.mark.parametrize("options", [pytest.param((), id="plain"), RECOVERS])
@pytest.mark.parametrize(("num_ranks", "what"), [(2, "sleeps"), (4, "stops")])
def test_a_farewell_ends_after_the_timeout_and_names_who_is_missing(num_ranks, what, options):
    done = run(PROGRAM, num_ranks, what, options=options)
    assert done.returncode == RANK_LOST, done.stderr
    assert done.stdout == "test accuracy 0.9\n"
    last = num_ranks - 1
    assert f"but rank 0 has waited so long for rank {last}" in done.stderr
    assert (f"rank {last} of this node stopped by a signal" in done.stderr) == (what == "stops")
