"""Spares replace lost ranks in ``elastic.run``; operations that spares cannot do end all ranks."""

import sys

import pytest
import torch

from hpctrain.checkpoint import load
from hpctrain.comm.serial import SerialCommunicator
from tests.harness import preload
from tests.horovod.elastic.test_recovery import check, launched
from tests.processes import ended

pytestmark = [pytest.mark.launches, pytest.mark.limit(150), pytest.mark.requires("recovery")]


def saved(folder, step, size):
    """Return the model state of a commit."""
    return load(folder / "saved" / f"{step}-{size}", SerialCommunicator()).state["model"]


def test_spares_keep_size_and_bits_until_none_is_left(tmp_path):
    """The first run never needs its spare; the second run loses ranks 0 and 1."""
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    whole.mkdir()
    lost.mkdir()
    ends, _ = launched(whole, [], num_ranks=3, spares=1)
    assert sorted(ends) == [0, 1, 2]
    ends, message = launched(lost, [(0, 4, 0), (1, 10, 0)], num_ranks=3, spares=1)
    assert sorted(ends) == [2, 3]
    check(ends)
    assert ends[3]["sizes"] == [3, 3, 2]
    assert "rank 0 of 3 died; the 2 survivors continue, with 1 of the spares" in message
    expected, found = saved(whole, 9, 3), saved(lost, 9, 3)
    assert {*expected} == {*found}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_stopped_spare_blocks_no_rank(tmp_path):
    """Once at the loss of a rank, where another spare takes the place, and once at the end."""
    loss, end = tmp_path / "loss", tmp_path / "end"
    loss.mkdir()
    end.mkdir()
    ends, message = launched(loss, [(2, "waiting", 3), (1, 4, 0)], num_ranks=2, spares=2)
    check(ends)
    assert "was stopped by a signal and is killed" in message
    assert ends[0]["sizes"] == [2, 2]
    _, message = launched(end, [(2, "waiting", 3)], num_ranks=2, spares=1)
    assert "was stopped by a signal and is killed" in message


PROGRAM = """
import os, signal, threading, time
from pathlib import Path
import torch
from mpi4py import MPI
import hpctrain as hvd
from hpctrain import elastic

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def wait_and_die():
    while not Path('here').exists():
        time.sleep(0.02)
    time.sleep(0.2)
    die()

def is_spare():
    return not hvd.current().is_first

def check_mpi():
    ours = hvd.current().ranks.Dup()
    assert ours.allreduce(1) == hvd.size()
    ours.Free()
    if is_spare(): MPI.COMM_WORLD.barrier()

hvd.init()
number = MPI.COMM_WORLD.rank
BEFORE

@elastic.run
def train(state):
    INSIDE
    while state.step < 6:
        state.step += 1
        if state.step == 3 and number == 1:
            die()
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
        numbers = [int(os.environ[name]) for name in names]
        assert numbers == [hvd.rank(), hvd.size()] * 2
        hvd.barrier()
        state.commit()

train(elastic.ObjectState(step=0))
AFTER
"""
RULE = "with --spares only DistributedOptimizer may communicate before elastic.run"
REFUSED = {
    "a named operation": {"before": "if is_spare(): hvd.barrier()", "message": RULE},
    "a call": {
        "before": "if is_spare(): hvd.current().comm.barrier()",
        "message": "ranks must make the same calls",
    },
    "twice": {
        "before": "number = 0",
        "after": "train(elastic.ObjectState(step=0))",
        "message": "omit --spares; got barrier",
    },
    "process sets": {
        "before": "hvd.init(process_sets=[hvd.ProcessSet([0])])",
        "message": "add_process_set",
    },
    "no state": {
        "before": "if is_spare(): Path('here').touch(); time.sleep(1)",
        "inside": "number or threading.Thread(target=wait_and_die, daemon=True).start()",
        "message": "all ranks that had it are lost, and only 1 spares remain",
    },
    "a model that it has not": {
        "before": "elastic.ObjectState = elastic.TorchState",
        "inside": "state.model = torch.nn.Linear(1, 1)",
        "message": "must be passed to the constructor of the state, but model was set later",
    },
    "a call of mpi4py": {
        "inside": "check_mpi()",
        "message": "if is_spare(): MPI.COMM_WORLD.barrier()",
    },
}


SHORT = ("a named operation", "no state", "a model that it has not")


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=() if w in SHORT else pytest.mark.conformance) for w in REFUSED]
)
def test_unsupported_use_of_spares_ends_all_ranks(tmp_path, what):
    program = PROGRAM
    for place in ("before", "inside", "after"):
        program = program.replace(place.upper(), REFUSED[what].get(place, ""))
    file = tmp_path / "program.py"
    file.write_text(program)
    line = [*preload.python(), "-m", "hpctrain", "launch", "-n", 2, "--recover", "--spares", 1]
    # A spare that fails alone ends the launcher, which is not the parent of forked processes.
    python = [sys.executable] if what == "a named operation" else preload.python()
    done = ended([*line, "--", *python, file], timeout=60, cwd=tmp_path)
    assert done.returncode not in (0, 124), done.stderr
    assert REFUSED[what]["message"] in done.stderr
    assert "all ranks have finished" not in done.stderr
