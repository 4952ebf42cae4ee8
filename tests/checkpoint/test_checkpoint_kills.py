"""Check that a kill at any time leaves a complete checkpoint, from which a job resumes.

By default a run is killed twice; ``TEST_KILLS=200`` sets 200 kills.
"""

import os
import random
import signal
import subprocess
import time

import pytest
import torch

from hpctrain.checkpoint.loading import check, load
from hpctrain.checkpoint.manager import Manager
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.launch import mpiexec
from tests.harness import preload

KILLS = int(os.environ.get("TEST_KILLS", "2"))
ALONE = SerialCommunicator()

SAVE_FOR_EVER = """
import itertools, os, sys
import torch
from hpctrain.checkpoint.saving import save
from hpctrain.comm.serial import SerialCommunicator

print("pid", os.getpid(), flush=True)
for number in itertools.count(1):
    state = {"w": torch.full((300_000,), float(number)), "number": number}
    directory = f"{sys.argv[1]}/step-{number if sys.argv[2] == 'new' else 0}"
    save(directory, state, SerialCommunicator(), step=number)
    print("step", number, flush=True)
"""

# Each step saves, and prints its number when the checkpoint is on disk.
TRAIN = """
import os, sys
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


def run_and_kill(line, delay_s, num_ranks=1):
    """Start a job, kill its ranks after a delay; return the last step that it has printed."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, **how, env=mpiexec.environment()) as job:
        pids, output = [], []
        while len(pids) < num_ranks or not output:
            words = job.stdout.readline().split()
            assert words, job.stderr.read()
            (pids if words[0] == "pid" else output).append(int(words[1]))
        time.sleep(delay_s)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        lines = [line for line in job.stdout if line.startswith("step ")]
        return max([output[-1], *(int(line.split()[1]) for line in lines)])


@pytest.mark.parametrize("where", ["new", "same"])
def test_checkpoints_completed_before_a_kill_are_whole(tmp_path, where):
    line = [*preload.python(), "-c", SAVE_FOR_EVER, tmp_path, where]
    finished = run_and_kill(line, random.Random(where).uniform(0, 0.1))
    seen = [path for path in tmp_path.iterdir() if path.suffix != ".part"]
    for path in seen:
        assert check(path) == []
        loaded = load(path, ALONE)
        assert torch.equal(loaded.state["w"], torch.full((300_000,), float(loaded.step)))
    if where == "new":
        assert len(seen) in (finished, finished + 1)
    else:
        assert [load(path, ALONE).step - finished for path in seen] in ([0], [1])


@pytest.mark.launches
@pytest.mark.limit(60 + 10 * KILLS)
def test_killed_job_resumes_from_a_whole_checkpoint(tmp_path):
    random_ = random.Random(0)
    job = mpiexec.command([*preload.python(), "-c", TRAIN, str(tmp_path)], num_ranks=2)
    for _ in range(KILLS):
        output = run_and_kill(job, random_.uniform(0, 0.3), num_ranks=2)
        manager = Manager(tmp_path, ALONE, background=False)
        assert check(manager.latest()) == []
        loaded = manager.load_latest()
        assert loaded.state["w"].unique().tolist() == [loaded.step]
        assert [loaded.private[rank] for rank in (0, 1)] == [
            {"rank": rank, "step": loaded.step} for rank in (0, 1)
        ]
        assert loaded.step >= output
