"""Ranks of ``hpctrain train`` die, and the surviving ranks continue in the same processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.core.records import read
from hpctrain.launch import mpiexec
from hpctrain.launch.rank_processes import descendants
from tests.harness import preload
from tests.processes import ended, wait_until
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


def trained(folder, name, *keys, kills="", spares=0):
    """Run to the end, on four ranks if there are kills; return the records and the output."""
    (folder / "dying.py").write_text(DYING)
    write_config(folder, "dying:model", epochs=8)
    keys = ("checkpoint.every=3", f"output_dir={name}", *keys)
    line = ["train", "small.toml", *(word for key in keys for word in ("--set", key))]
    if kills:
        launch = ["launch", "-n", "4", "--nodes", "2", "--recover", "--spares", str(spares)]
        line = [*launch, *preload.python(), "-m", "hpctrain", *line]
    environ = mpiexec.environment() | {"PYTHONPATH": str(ROOT), "KILLS": kills}
    done = ended(
        [*preload.python(), "-m", "hpctrain", *line], timeout=LIMIT_S, env=environ, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read(folder / name / "metrics.jsonl"), done.stdout + done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Records of a reproducible run that loses no rank."""
    return trained(tmp_path_factory.mktemp("whole"), "whole", *REPRODUCIBLE)[0]


def test_a_reproducible_run_that_loses_ranks_has_the_same_bits(tmp_path, whole):
    """Rank 1 dies before the first checkpoint, when no file has the number of micro-shards.

    Then rank 0 dies, which is the last rank of its node, and rank 2 leads the run.
    """
    lost, message = trained(tmp_path, "lost", *REPRODUCIBLE[:1], kills="1:1 0:20")
    assert lost[-1]["event"] == whole[-1]["event"] == "finished"
    assert lost[-1]["state_hash"] == whole[-1]["state_hash"]
    assert sizes(lost) == [3, 2]  # without a finished step it began again
    assert "rank 1 of 4 died; the 3 survivors continue" in message
    assert "rank 0 of 3 died; the 2 survivors continue" in message


def sizes(records):
    return [r["world_size"] for r in records if r["event"] in ("started", "resumed")]


@pytest.mark.conformance
def test_spares_keep_the_size_and_the_bits_of_a_run(tmp_path, whole):
    """Rank 1 and then rank 0 die; there is one spare."""
    lost, message = trained(tmp_path, "lost", *REPRODUCIBLE, kills="1:10 0:20", spares=1)
    assert lost[-1]["event"] == whole[-1]["event"] == "finished"
    assert lost[-1]["state_hash"] == whole[-1]["state_hash"]
    assert sizes(lost) == [4, 4, 3]
    assert "rank 1 of 4 died; the 3 survivors continue, with 1 of the spares" in message


WITH_SPARE = [sys.executable, "-m", "hpctrain", "launch", "-n", "2", "--recover", "--spares", "1"]


def spare_of(launch):
    """Return the process id of the spare, which is the last rank of a launch."""
    for pid in descendants(launch.pid):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"OMPI_COMM_WORLD_RANK=2" in variables:
            return pid
    raise AssertionError("there is no spare")


def cpu_s(pid):
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


SLOW = "import time, hpctrain; hpctrain.init(); time.sleep({}); print(hpctrain.size())"


@pytest.mark.parametrize("dies", [pytest.param(False, marks=pytest.mark.conformance), True])
def test_an_idle_spare_uses_no_cpu_and_its_death_does_not_affect_the_run(tmp_path, dies):
    with subprocess.Popen(
        [*WITH_SPARE, "--", sys.executable, "-c", SLOW.format(2 if dies else 4)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "message").open("wb"),
    ) as launch:
        output = tmp_path / "message"
        assert wait_until(lambda: b"all ranks have started" in output.read_bytes(), 90)
        spare = spare_of(launch)
        if dies:
            os.kill(spare, signal.SIGKILL)
        else:
            before = cpu_s(spare)
            time.sleep(2)
            assert cpu_s(spare) - before < 0.05 * 2
        out = launch.communicate(timeout=100)[0]
    message = (tmp_path / "message").read_text()
    assert launch.returncode == 0, message
    assert out.split() == [b"2", b"2"]
    assert ("a spare rank died before it was needed" in message) == dies


def test_spares_end_with_the_last_rank(tmp_path):
    write_config(tmp_path, "dying:model", epochs=2)
    (tmp_path / "dying.py").write_text(DYING)
    environ = mpiexec.environment() | {"PYTHONPATH": str(ROOT), "KILLS": "0:4 1:4"}
    done = ended(
        [*WITH_SPARE, *preload.python(), "-m", "hpctrain", "train", "small.toml"],
        timeout=100,
        env=environ,
        cwd=tmp_path,
    )
    assert done.returncode not in (0, 124), done.stderr
    assert "all 2 workers died while this spare waited" in done.stderr
