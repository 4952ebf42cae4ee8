"""Ranks of ``hpctrain train`` die; those that are left go on in the same processes."""

import pytest

from hpctrain.core.records import read
from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.processes import ended
from tests.train.starting import LIMIT_S, ROOT, write_config

pytestmark = [pytest.mark.launches, pytest.mark.requires("recovery"), pytest.mark.limit(200)]

DYING = """
import os, signal
from tests.train import problem

KILLS = dict(pair.split(":") for pair in os.environ.get("KILLS", "").split())
STEP = KILLS.get(os.environ.get("OMPI_COMM_WORLD_RANK", ""))
COUNT = [0]

class Model(type(problem.model())):
    def forward(self, x):
        COUNT[0] += self.training
        if self.training and str(COUNT[0]) == STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

def model():
    return Model(*problem.model(dropout=0.2))
"""
REPRODUCIBLE = ("train.reproducible=true", "train.micro_shards=4")


def trained(folder, name, *keys, kills=""):
    """Run to the end, on four ranks if some are to die; return the records and what was said."""
    (folder / "dying.py").write_text(DYING)
    write_config(folder, "dying:model", epochs=8)
    keys = ("checkpoint.every=3", f"output_dir={name}", *keys)
    line = ["train", "small.toml", *(word for key in keys for word in ("--set", key))]
    if kills:
        line = ["launch", "-n", "4", "--nodes", "2", "--recover", "hpctrain", *line]
    environ = mpiexec.environment() | {"PYTHONPATH": str(ROOT), "KILLS": kills}
    done = ended(
        [*preload.python(), "-m", "hpctrain", *line], timeout=LIMIT_S, env=environ, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read(folder / name / "metrics.jsonl"), done.stdout + done.stderr


def test_a_reproducible_run_that_loses_ranks_has_the_bits_of_one_that_does_not(tmp_path):
    """The only rank of rank 0's node that is left dies later: rank 2 then leads the run."""
    whole, _ = trained(tmp_path, "whole", *REPRODUCIBLE)
    lost, said = trained(tmp_path, "lost", *REPRODUCIBLE, kills="1:10 0:20")
    assert lost[-1]["event"] == whole[-1]["event"] == "finished"
    assert lost[-1]["state_hash"] == whole[-1]["state_hash"]
    assert [r["world_size"] for r in lost if r["event"] in ("started", "resumed")] == [4, 3, 2]
    assert "rank 1 of 4 died; the 3 that are left go on" in said
    assert "rank 0 of 3 died; the 2 that are left go on" in said


@pytest.mark.parametrize(
    "keys", [("sync.method=diloco", "sync.steps=2"), ("train.shard=node",)], ids=["diloco", "node"]
)
def test_other_methods_go_on_with_those_that_are_left(tmp_path, keys):
    records, said = trained(tmp_path, "run", *keys, kills="2:6 3:6")
    assert records[-1]["event"] == "finished"
    assert "ranks 2-3 of 4 died; the 2 that are left go on" in said
    steps = [record["step"] for record in records if record["event"] == "step"]
    assert steps == sorted(set(steps))  # what was learnt twice is told once
