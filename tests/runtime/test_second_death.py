"""After a death during the rebuild, the surviving ranks build a still smaller world."""

import pytest

from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.processes import ended
from tests.train.starting import ROOT

pytestmark = [pytest.mark.launches, pytest.mark.requires("recovery"), pytest.mark.limit(150)]

PROGRAM = """
import os, signal, time
from pathlib import Path
import torch
import hpctrain
from hpctrain.cluster.process import stat
from hpctrain.comm import build, watched_calls
from hpctrain.core.errors import RankLostError
from hpctrain.runtime import recovery

hpctrain.init()
ME = hpctrain.rank()
PIDS = hpctrain.allgather_object(os.getpid())
share, wait, is_remade = build.share_memory, watched_calls.wait_request, False

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def share_memory(*arguments):
    "Kill rank 2 after the creation of the control communicator, and let rank 0 detect it."
    global is_remade
    if is_remade or ME == 1:
        return share(*arguments)
    is_remade = True
    if ME == 2:
        die()
    while (found := stat(PIDS[2])) and found.state not in "ZX":
        time.sleep(0.001)
    raise RankLostError("rank 2 died")

def wait_request(request, watch):
    "Let rank 1 detect late that its duplicate is complete."
    while not request.Test():
        watch.look(0.0)
        time.sleep(0.1)

def job():
    hpctrain.allreduce_(torch.ones(9))
    if hpctrain.size() == 4:
        build.share_memory = share_memory
        if ME == 1:
            watched_calls.wait_request = wait_request
        if ME == 3:
            die()
    hpctrain.allreduce_(torch.ones(9))
    return hpctrain.size()

found = recovery.attempt(job)
while found.result is None:
    found = recovery.attempt(job)
print("of", found.result)
"""


def test_a_slow_rank_in_a_new_world_survives_a_second_death(tmp_path):
    """The rank that detects the death revokes communicators that a slow rank still creates."""
    (tmp_path / "program.py").write_text(PROGRAM)
    line = [*preload.python(), "-m", "hpctrain", "launch", "-n", "4", "--recover"]
    done = ended(
        [*line, *preload.python(), str(tmp_path / "program.py")],
        timeout=140,
        env=mpiexec.environment() | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["of", "2"] * 2, done.stderr
