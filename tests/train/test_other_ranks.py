"""Runs whose parts have other numbers of ranks, each part a launch: 4, 2, 4, 3."""

from collections import Counter
from pathlib import Path

import pytest

import hpctrain
from hpctrain.train.load import load
from hpctrain.train.metrics import read
from hpctrain.train.run import How, run
from tests.train.job import assert_same_bits, newest_model
from tests.train.problem import NUM_SAMPLES
from tests.train.starting import start

EPOCHS = 4

TASK = """
import os, signal
from tests.train import problem

class Model(type(problem.model())):
    '''Notes what it learns from; the last of several ranks wants a stop after some passes.'''

    def forward(self, x):
        if self.training:
            with open(self.notes, "a") as file:
                file.write("".join(f"{value!r}\\n" for value in x[:, 0].tolist()))
            self.passes += 1
            size = self.size()
            if self.passes == 5 and size in (2, 4) and self.rank() == size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
        return super().forward(x)

def model(notes, dropout=0.0):
    import hpctrain
    model = Model(*problem.model(dropout=dropout))
    model.notes, model.passes = notes, 0
    model.rank, model.size = hpctrain.rank, hpctrain.size
    return model
"""

CONFIG = f"""
[model]
target = "noting_task:model"
[data]
target = "tests.train.problem:data"
args = {{ folder = "d" }}
[train]
epochs = {EPOCHS}
global_batch = 9
[log]
every_steps = 1
plots = false
"""

KINDS = {
    "plain": ["model.args.notes=plain.txt"],
    "fixed": ["model.args={notes = 'fixed.txt', dropout = 0.3}", "train.reproducible=true"],
}

PART = f"""
import sys
from pathlib import Path
from hpctrain.train.load import load
from hpctrain.train.run import How, run

for name, overrides in {KINDS!r}.items():
    how = How(resume=sys.argv[1] == "resume")
    print(name, run(load(Path("small.toml"), [f"name={{name}}", *overrides]), {{}}, how))
"""


def curve(name: str) -> list[float]:
    """Losses of a run, step by step and test by test."""
    records = read(Path("runs") / name / "metrics.jsonl")
    return [record["loss"] for record in records if record["event"] in ("step", "test")]


@pytest.mark.launches
@pytest.mark.conformance
@pytest.mark.limit(300)
def test_a_run_goes_on_from_4_to_2_to_4_to_3_ranks(tmp_path, monkeypatch):
    (tmp_path / "noting_task.py").write_text(TASK)
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "part.py").write_text(PART)
    for number, num_ranks in enumerate((4, 2, 4, 3)):
        word, code = "resume" if number else "begin", 0 if num_ranks == 3 else 85
        done = start("part.py", word, num_ranks=num_ranks, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert {f"plain {code}", f"fixed {code}"} <= {*done.stdout.splitlines()}, done.stdout
    monkeypatch.chdir(tmp_path)
    assert "micro_shards = 4\n" in Path("runs/fixed/config.toml").read_text()
    try:
        for name, overrides in KINDS.items():
            more = [f"name={name}-alone", "train.micro_shards=4", "model.args.notes=alone.txt"]
            assert run(load(Path("small.toml"), [*overrides, *more]), {}, How()) == 0
    finally:
        hpctrain.shutdown()
    once = Counter(set(Path("alone.txt").read_text().split()))
    assert len(once) == NUM_SAMPLES
    for name in KINDS:
        seen = Counter(Path(f"{name}.txt").read_text().split())
        assert seen == dict.fromkeys(once, EPOCHS)
    assert curve("plain") == pytest.approx(curve("plain-alone"), rel=1e-9)
    assert curve("fixed") == curve("fixed-alone")
    runs = [Path("runs") / name for name in ("fixed", "fixed-alone")]
    assert len({read(path / "metrics.jsonl")[-1]["state_hash"] for path in runs}) == 1
    assert_same_bits(*(newest_model(path) for path in runs))
