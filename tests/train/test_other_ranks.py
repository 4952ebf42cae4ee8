"""Runs whose parts have different numbers of ranks: 4, 2, 4 and 3, or 3 and 2.

Each part is a separate launch.
"""

from collections import Counter
from pathlib import Path

import pytest

import hpctrain
from hpctrain.core.records import read
from hpctrain.train.load_config import load
from hpctrain.train.run import RunOptions, run
from tests.train.job import assert_same_bits, newest_model
from tests.train.problem import NUM_SAMPLES
from tests.train.starting import start, write_config

pytestmark = [pytest.mark.launches, pytest.mark.conformance, pytest.mark.limit(300)]

EPOCHS = 4

PART = """
import sys
from pathlib import Path
from hpctrain.train.load_config import load
from hpctrain.train.run import RunOptions, run

for name, overrides in {kinds!r}.items():
    how = RunOptions(resume=sys.argv[1] == "resume")
    done = run(load(Path("small.toml"), [f"name={{name}}", *overrides]), {{}}, how)
    print(name, done, flush=True)
"""


@pytest.fixture
def carry_out(tmp_path, monkeypatch):
    """Function that executes parts of runs on given numbers of ranks; all but the last stop."""
    monkeypatch.setenv("HPCTRAIN_PROBE", "off")
    target = "tests.train.problem:stopping_model"
    write_config(tmp_path, target, epochs=EPOCHS, batch=9)

    def do(kinds, *ranks):
        (tmp_path / "part.py").write_text(PART.format(kinds=kinds))
        for number, num_ranks in enumerate(ranks, 1):
            word, code = "begin" if number == 1 else "resume", 0 if number == len(ranks) else 85
            done = start("part.py", word, num_ranks=num_ranks, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert {f"{name} {code}" for name in kinds} <= {*done.stdout.splitlines()}, done.stdout
        monkeypatch.chdir(tmp_path)
        return done.stdout

    return do


def records(name):
    return read(Path("runs") / name / "metrics.jsonl")


def curve(name):
    """Return the losses of all steps and tests of a run."""
    return [record["loss"] for record in records(name) if record["event"] in ("step", "test")]


KINDS = {
    "plain": ["model.args.notes=plain.txt"],
    "tensors": ["model.args.notes=tensors.txt", "optimizer.name=Adafactor", "train.shard=node"],
    "fixed": ["model.args={notes = 'fixed.txt', dropout = 0.3}", "train.reproducible=true"],
}


def test_a_run_continues_on_4_2_4_and_3_ranks(carry_out):
    carry_out(KINDS, 4, 2, 4, 3)
    assert "micro_shards = 4\n" in Path("runs/fixed/config.toml").read_text()
    try:
        for name, overrides in KINDS.items():
            more = [f"name={name}-alone", "train.micro_shards=4", "model.args.notes=alone.txt"]
            assert run(load(Path("small.toml"), [*overrides, *more]), {}, RunOptions()) == 0
    finally:
        hpctrain.shutdown()
    once = Counter(set(Path("alone.txt").read_text().split()))
    assert len(once) == NUM_SAMPLES
    for name in KINDS:
        seen = Counter(Path(f"{name}.txt").read_text().split())
        assert seen == dict.fromkeys(once, EPOCHS)
    for name in ("plain", "tensors"):
        assert curve(name) == pytest.approx(curve(f"{name}-alone"), rel=1e-9)
    assert curve("fixed") == curve("fixed-alone")
    runs = [Path("runs") / name for name in ("fixed", "fixed-alone")]
    assert len({records(name)[-1]["state_hash"] for name in ("fixed", "fixed-alone")}) == 1
    assert_same_bits(*(newest_model(path) for path in runs))


SHORT = ["train.epochs=2", "comm.ranks_per_node=1", "sync.steps=4", "log.every_steps=10"]
METHODS = {
    "local_sgd": ["sync.compression=fp16"],
    "post_local_sgd": ["sync.args.start=3"],
    "hierarchical_local_sgd": [],
    "staged_sgd": [],
    "diloco": ["sync.args={fragments = 2, delay = 1}"],
}


def test_unsent_errors_of_a_codec_are_kept_for_another_number_of_ranks(carry_out):
    model = "model.args={stops = [3], norm = true}"
    more = ["train.epochs=2", "comm.ranks_per_node=1", "sync.compression_args={density = 0.05}"]
    carry_out({"few": [model, "sync.compression=top_k", *more]}, 3, 2)
    tests = [record["loss"] for record in records("few") if record["event"] == "test"]
    assert records("few")[-1]["event"] == "finished"
    assert tests[-1] < tests[0]


def test_every_method_resumes_within_a_round_on_another_number_of_ranks(carry_out):
    model = "model.args={stops = [3], norm = true}"
    kinds = {name: [model, f"sync.method={name}", *SHORT, *more] for name, more in METHODS.items()}
    message = carry_out(kinds, 3, 2)
    assert "the checkpoint was saved by 3 ranks, this run has 2: each rank continues" in message
    for name in METHODS:
        found = records(name)
        (resumed,) = [record for record in found if record["event"] == "resumed"]
        tests = [r["loss"] for r in found if r["event"] == "test"]
        assert (resumed["step"], resumed["ended_by"]) == (6, "SIGUSR1")
        assert (found[-1]["event"], found[-1]["step"]) == ("finished", 12)
        assert found[-1]["rounds"] >= 2
        assert tests[-1] < tests[0]
