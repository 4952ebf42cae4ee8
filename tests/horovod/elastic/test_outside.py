"""A death under ``--recover`` outside the function of ``elastic.run`` ends all ranks."""

import time

import pytest

from tests.harness import preload
from tests.harness.pace import scaled
from tests.processes import ended

PROGRAM = """
import os, signal, sys, time
import torch
import hpctrain as hvd
from hpctrain import elastic

hvd.init()

def lose_one():
    if hvd.rank() == 1:
        print(time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.broadcast_parameters({"weight": torch.ones(3)}, root_rank=0)

@elastic.run
def train(state):
    state.commit()

sys.argv[1] == "before" and lose_one()
train(elastic.ObjectState(step=0))
sys.argv[1] == "after" and lose_one()
"""


@pytest.mark.launches
@pytest.mark.limit(100)
@pytest.mark.requires("recovery")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_outside_elastic_run_ends_all_ranks_with_a_remedy(monkeypatch, when):
    monkeypatch.setenv("HPCTRAIN_RANKS_PER_NODE", "3" if when == "before" else "1")
    line = [*preload.python(), "-m", "hpctrain", "launch", "-n", 3, "--recover", "--"]
    done = ended([*line, *preload.python(), "-c", PROGRAM, when])
    assert time.time() - float(done.stdout) < scaled(10)
    assert done.returncode not in (0, 124), done.stderr
    assert "died" in done.stderr
    assert "inside the function of hpctrain.elastic.run" in done.stderr
    assert "restart from a checkpoint by launch --restart N" in done.stderr
    assert "MPI_ERR" not in done.stderr
