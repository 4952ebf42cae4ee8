"""Runs of every local method that stop in the middle of a round on 3 ranks, and go on with 2."""

from pathlib import Path

import pytest

from hpctrain.train.metrics import read
from tests.train.starting import start

PART = """
import sys
from pathlib import Path
from hpctrain.train.load import load
from hpctrain.train.run import How, run

for name, overrides in {cases!r}.items():
    how = How(resume=sys.argv[1] == "resume")
    done = run(load(Path("small.toml"), [f"name={{name}}", *overrides]), {{}}, how)
    print(name, done, flush=True)
"""

TASK = """
import os, signal
from tests.train import problem

class Model(type(problem.model())):
    passes = 0

    def forward(self, x):
        import hpctrain
        self.passes += self.training
        if self.passes == 5 and hpctrain.rank() == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().forward(x)

def model():
    return Model(*problem.model(norm=True))
"""

CONFIG = """
[model]
target = "stopping_task:model"
[data]
target = "tests.train.problem:data"
args = { folder = "d" }
[train]
epochs = 2
global_batch = 9
[comm]
ranks_per_node = 1
[log]
plots = false
[sync]
steps = 4
"""


@pytest.mark.launches
@pytest.mark.conformance
@pytest.mark.limit(200)
def test_every_method_goes_on_in_mid_round_on_another_number_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_PROBE", "off")
    cases = {
        name: [f"sync.method={name}"]
        for name in ("local_sgd", "post_local_sgd", "hierarchical_local_sgd", "staged_sgd")
    }
    cases["local_sgd"] += ["sync.compression=fp16"]
    cases["post_local_sgd"] += ["sync.args.start=3"]
    cases["diloco"] = ["sync.method=diloco", "sync.args={fragments = 2, delay = 1}"]
    (tmp_path / "stopping_task.py").write_text(TASK)
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "part.py").write_text(PART.format(cases=cases))
    for word, num_ranks, code in (("begin", 3, 85), ("resume", 2, 0)):
        done = start("part.py", word, num_ranks=num_ranks, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert {f"{name} {code}" for name in cases} <= {*done.stdout.splitlines()}, done.stdout
    assert (
        "the checkpoint is of 3 ranks, this run has 2: each goes on from the mean" in done.stdout
    )
    monkeypatch.chdir(tmp_path)
    for name in cases:
        records = read(Path("runs") / name / "metrics.jsonl")
        (resumed,) = [record for record in records if record["event"] == "resumed"]
        tests = [r["loss"] for r in records if r["event"] == "test"]
        assert (resumed["step"], resumed["ended_by"]) == (6, "SIGUSR1")
        assert (records[-1]["event"], records[-1]["step"]) == ("finished", 12)
        assert records[-1]["rounds"] >= 2
        assert tests[-1] < tests[0]
