"""A save that is killed at any instant leaves the checkpoint before it, or is whole."""

import random
import subprocess
import sys
import time

import pytest
import torch

from hpctrain.checkpoint.loading import check, load
from hpctrain.comm.serial import SerialCommunicator

SAVE_FOR_EVER = """
import itertools, sys
import torch
from hpctrain.checkpoint.saving import save
from hpctrain.comm.serial import SerialCommunicator

for number in itertools.count(1):
    state = {"w": torch.full((300_000,), float(number)), "number": number}
    directory = f"{sys.argv[1]}/step-{number if sys.argv[2] == 'new' else 0}"
    save(directory, state, SerialCommunicator(), step=number)
    print(number, flush=True)
"""


@pytest.mark.parametrize("attempt", range(2))
@pytest.mark.parametrize("where", ["new", "same"])
def test_what_was_finished_before_a_kill_is_whole(tmp_path, where, attempt):
    command = [sys.executable, "-c", SAVE_FOR_EVER, tmp_path, where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as saver:
        saver.stdout.readline()
        time.sleep(random.Random(attempt).uniform(0, 0.1))
        saver.kill()
        finished = 1 + len(saver.stdout.read().split())
    seen = [path for path in tmp_path.iterdir() if path.suffix != ".part"]
    for path in seen:
        assert check(path) == []
        loaded = load(path, SerialCommunicator())
        assert torch.equal(loaded.state["w"], torch.full((300_000,), float(loaded.step)))
    if where == "new":
        assert len(seen) in (finished, finished + 1)
    else:
        assert [load(path, SerialCommunicator()).step - finished for path in seen] in ([0], [1])
