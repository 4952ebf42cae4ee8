"""A file of torch is read back bit for bit, or told in one line; nothing of it is run."""

import os
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.format.plain import load
from hpctrain.core.errors import CheckpointError


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
    torch.save(trained(), tmp_path / "state.pt")
    assert same(trained(), load(tmp_path / "state.pt"))


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_told(tmp_path, part):
    old = tmp_path / "state.pt"
    torch.save(trained(), old)
    os.truncate(old, int(old.stat().st_size * part))
    with pytest.raises(CheckpointError, match="use another one"):
        load(old)


def test_a_file_of_another_program_runs_no_code(tmp_path):
    old = tmp_path / "state.pt"
    torch.save({"value": Path("x")}, old)
    with pytest.raises(CheckpointError, match="use another one"):
        load(old)
    old.write_text("what is this")
    with pytest.raises(CheckpointError, match="use another one"):
        load(old)
