"""A checkpoint is read back bit for bit; a failed one leaves the old one."""

import os
import random
import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.plain import load, save, save_on_root
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.errors import CheckpointError
from tests.full_disk import largest_file


def trained():
    """Train a small model for a step; return its state and that of its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 20)).square().sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "order": {"seed": 2**63, "name": "global", "sizes": (1, 2.5, None, True)},
        "half": torch.randn(5).bfloat16(),
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_a_state_is_read_back_bit_for_bit(tmp_path):
    save(tmp_path / "new" / "state.pt", trained())
    assert same(trained(), load(tmp_path / "new" / "state.pt"))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["state.pt"]


@pytest.fixture
def old(tmp_path):
    """Give the path of a checkpoint that says "old"."""
    path = tmp_path / "state.pt"
    save(path, {"text": "old"})
    return path


def is_alone_and_old(path):
    return load(path) == {"text": "old"} and list(path.parent.iterdir()) == [path]


def test_a_new_checkpoint_replaces_the_old_one(old):
    save(old, {"text": "new"})
    assert load(old) == {"text": "new"}


@pytest.mark.parametrize("num_bytes", [0, 500, 100_000, 4_000_000])
def test_a_full_disk_is_told_and_leaves_the_old_checkpoint(old, num_bytes):
    with (
        largest_file(num_bytes),
        pytest.raises(CheckpointError, match=r"state.pt: File too large; .* is intact"),
    ):
        save(old, {"weights": torch.zeros(1_000_000)})
    assert is_alone_and_old(old)


@pytest.mark.parametrize(
    "value",
    [np.float64(0.5), np.zeros(3), Path("x"), lambda: 0, torch.nn.ReLU()],
    ids=lambda value: type(value).__name__,
)
def test_a_state_that_could_not_be_read_back_is_not_written(old, value):
    with pytest.raises(
        CheckpointError, match="a checkpoint holds tensors and plain Python values"
    ):
        save(old, {"text": "new", "value": value})
    assert is_alone_and_old(old)


def test_a_directory_that_cannot_be_had_is_told(old):
    with pytest.raises(CheckpointError, match="Not a directory"):
        save(old / "below" / "state.pt", {})


def test_a_missing_checkpoint_is_told(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*state.pt; check"):
        load(tmp_path / "state.pt")


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_checkpoint_is_told(old, part):
    save(old, trained())
    os.truncate(old, int(old.stat().st_size * part))
    with pytest.raises(CheckpointError, match="use another one"):
        load(old)


def test_a_file_of_another_program_runs_no_code(old):
    torch.save({"value": Path("x")}, old)
    with pytest.raises(CheckpointError, match="use another one"):
        load(old)
    old.write_text("what is this")
    with pytest.raises(CheckpointError, match="use another one"):
        load(old)


SAVE_FOR_EVER = """
import itertools, sys
import torch
from hpctrain.checkpoint.plain import save

for generation in itertools.count(1):
    save(sys.argv[1], {"weights": torch.full((100_000,), float(generation))})
    print(generation, flush=True)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path, attempt):
    path = tmp_path / "state.pt"
    delay_s = random.Random(attempt).uniform(0, 0.1)
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVE_FOR_EVER, path], stdout=subprocess.PIPE, text=True
    )
    with saver:
        saver.stdout.readline()
        select.select([], [], [], delay_s)
        saver.kill()
        finished = 1 + len(saver.stdout.read().split())
    weights = load(path)["weights"]
    assert weights.unique().tolist() in ([finished], [finished + 1])


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_ranks_return_when_the_state_of_rank_0_is_on_disk(world, tmp_path):
    path = world.bcast(tmp_path) / "state.pt"
    save_on_root(path, {"rank": world.rank}, MpiCommunicator(world))
    assert load(path) == {"rank": 0}


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_failure_of_rank_0_is_told_on_every_rank(world, tmp_path):
    path = world.bcast(tmp_path) / "file"
    if world.rank == 0:
        path.touch()
    with pytest.raises(
        CheckpointError, match=r"cannot write checkpoint .*file/state.pt: File exists"
    ):
        save_on_root(path / "state.pt", {}, MpiCommunicator(world))
