"""Runs of every method that go on with another number of ranks: launches of 3 and of 2."""

import pytest

from hpctrain.train.metrics import read
from tests.train.starting import start

pytestmark = [pytest.mark.launches, pytest.mark.conformance, pytest.mark.limit(300)]

TASK = """
import os, signal
from tests.train import problem

class Model(type(problem.model())):
    '''The last of three ranks wants a stop after some passes.'''

    passes = 0

    def forward(self, x):
        import hpctrain
        self.passes += self.training
        if self.passes == 5 and hpctrain.rank() == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().forward(x)

def model(**how):
    return Model(*problem.model(**how))
"""

CONFIG = """
[model]
target = "stopping_task:model"
args = { norm = true }
[data]
target = "tests.train.problem:data"
args = { folder = "d" }
[train]
epochs = 2
global_batch = 9
[comm]
ranks_per_node = 1
[sync]
steps = 4
[log]
every_steps = 10
plots = false
"""

PART = """
import sys
from pathlib import Path
from hpctrain.train.load import load
from hpctrain.train.run import How, run

for name, overrides in {kinds!r}.items():
    how = How(resume=sys.argv[1] == "resume")
    done = run(load(Path("small.toml"), [f"name={{name}}", *overrides]), {{}}, how)
    print(name, done, flush=True)
"""


METHODS = {
    "local_sgd": ["sync.compression=fp16"],
    "post_local_sgd": ["sync.args.start=3"],
    "hierarchical_local_sgd": [],
    "staged_sgd": [],
    "diloco": ["sync.args={fragments = 2, delay = 1}"],
}


def test_every_method_goes_on_in_mid_round_on_another_number_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_PROBE", "off")
    kinds = {name: [f"sync.method={name}", *more] for name, more in METHODS.items()}
    (tmp_path / "stopping_task.py").write_text(TASK)
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "part.py").write_text(PART.format(kinds=kinds))
    for word, num_ranks, code in (("begin", 3, 85), ("resume", 2, 0)):
        done = start("part.py", word, num_ranks=num_ranks, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert {f"{name} {code}" for name in kinds} <= {*done.stdout.splitlines()}, done.stdout
    said = "the checkpoint is of 3 ranks, this run has 2: each goes on from the mean"
    assert said in done.stdout
    for name in METHODS:
        found = read(tmp_path / "runs" / name / "metrics.jsonl")
        (resumed,) = [record for record in found if record["event"] == "resumed"]
        tests = [r["loss"] for r in found if r["event"] == "test"]
        assert (resumed["step"], resumed["ended_by"]) == (6, "SIGUSR1")
        assert (found[-1]["event"], found[-1]["step"]) == ("finished", 12)
        assert found[-1]["rounds"] >= 2
        assert tests[-1] < tests[0]
