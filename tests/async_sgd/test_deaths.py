"""Ranks that die among parameter servers: all ranks end, or those that are left go on."""

import sys

import pytest

from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.processes import ended
from tests.train.starting import ROOT
from tests.train.test_recovery import trained

pytestmark = [pytest.mark.launches, pytest.mark.limit(120)]

SCRIPT = """
import os, signal, sys, time
import torch
import hpctrain as hvd

hvd.init()
model = torch.nn.Linear(9, 9)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
make, what, dying = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = {"servers": [0]} if what.startswith("server") else {}
with getattr(hvd, make)(model, optimizer, **options) as method:
    if hvd.rank() == dying == 0 and not method.is_worker:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(40 if method.is_worker else 0):
        time.sleep(0.02)
        if step == 5 and hvd.rank() == dying:
            if what == "raise":
                raise ValueError("mine")
            if what == "exit":
                sys.exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(4, 9)).sum().backward()
        optimizer.step()
print("whole", flush=True)
"""


@pytest.mark.parametrize(
    ("make", "what", "dying"),
    [
        ("StaleSynchronous", "kill", 1),
        ("StaleSynchronous", "server, kill", 0),
        ("AsyncSGD", "exit", 1),
        pytest.param("AsyncSGD", "kill", 1, marks=pytest.mark.conformance),
        pytest.param("StaleSynchronous", "raise", 1, marks=pytest.mark.conformance),
    ],
)
def test_a_rank_that_ends_early_ends_all_and_nobody_hangs(tmp_path, make, what, dying):
    (tmp_path / "script.py").write_text(SCRIPT)
    line = ["-m", "hpctrain", "launch", "-n", "3", "--", sys.executable, "script.py"]
    environ = mpiexec.environment() | {"PYTHONPATH": str(ROOT)}
    done = ended(
        [*preload.python(), *line, make, what, str(dying)], timeout=100, env=environ, cwd=tmp_path
    )
    assert done.returncode != 0
    assert "whole" not in done.stdout


@pytest.mark.conformance
@pytest.mark.requires("recovery")
def test_a_run_that_loses_a_rank_goes_on_from_its_checkpoint(tmp_path):
    lost, said = trained(tmp_path, "lost", "sync.method=ssp", kills="1:20")
    assert lost[-1]["event"] == "finished"
    assert [r["world_size"] for r in lost if r["event"] in ("started", "resumed")] == [4, 3]
    assert "rank 1 of 4 died; the 3 that are left go on" in said
