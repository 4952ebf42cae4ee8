"""A job of two ranks that is killed at any instant goes on from a good checkpoint, each time.

Here are four kills of one run; ``HPCTRAIN_TEST_KILLS=200`` makes it 200.
"""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from hpctrain.checkpoint.loading import check
from hpctrain.checkpoint.manager import Manager
from hpctrain.comm.serial import SerialCommunicator

KILLS = int(os.environ.get("HPCTRAIN_TEST_KILLS", "4"))

# Each step saves, and is printed when it is known to be on disk.
TRAIN = """
import itertools, os, sys
import torch
import hpctrain
from hpctrain.checkpoint.manager import Manager
from hpctrain.runtime.world import current

hpctrain.init()
comm = current().comm
manager = Manager(sys.argv[1], comm)
loaded = manager.load_latest()
step = loaded.step if loaded else 0
weights = loaded.state["w"] if loaded else torch.zeros(600_000)
print("pid", os.getpid(), flush=True)
while True:
    step += 1
    weights += 1
    assert weights.unique().tolist() == [step]
    manager.save({"w": weights}, step, {"rank": comm.rank, "step": step})
    if comm.rank == 0 and (figures := manager.figures()):
        print("step", figures.step, flush=True)
"""


def run_and_kill(folder, delay_s):
    """Start the job, kill its ranks after a while; return the last step that it has told."""
    command = [sys.executable, "-m", "hpctrain", "launch", "-n", "2", "--", sys.executable, "-c"]
    with subprocess.Popen(
        [*command, TRAIN, folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        pids, told = [], [0]
        while len(pids) < 2 or len(told) < 2:
            words = job.stdout.readline().split()
            assert words, job.stderr.read()
            (pids if words[0] == "pid" else told).append(int(words[1]))
        time.sleep(delay_s)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        lines = [line for line in job.stdout if line.startswith("step ")]
        return max([told[-1], *(int(line.split()[1]) for line in lines)])


@pytest.mark.launches
@pytest.mark.limit(60 + 10 * KILLS)
def test_a_killed_job_goes_on_from_a_whole_checkpoint(tmp_path):
    random_ = random.Random(0)
    for _ in range(KILLS):
        told = run_and_kill(tmp_path, random_.uniform(0, 0.3))
        manager = Manager(tmp_path, SerialCommunicator(), background=False)
        newest = manager.latest()
        assert check(newest) == []
        loaded = manager.load_latest()
        assert loaded.state["w"].unique().tolist() == [loaded.step]
        assert [loaded.private[rank] for rank in (0, 1)] == [
            {"rank": rank, "step": loaded.step} for rank in (0, 1)
        ]
        assert loaded.step >= told
