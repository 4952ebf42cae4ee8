"""``hpctrain launch --restart``: what fails is started again, on the hosts that are left."""

import sys

import pytest

from hpctrain.core.records import read
from hpctrain.launch import mpiexec
from hpctrain.launch.restart import num_places, resumed
from tests.cluster.vcluster import VirtualCluster
from tests.cluster.vcluster.cluster import AGENT, BIN
from tests.processes import ended, wait_until
from tests.train.starting import ROOT, write_config

pytestmark = pytest.mark.launches

SLOW = """
import time
from tests.train import problem

class Model(type(problem.model())):
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)

def model():
    return Model(*problem.model())
"""


def test_a_training_goes_on_with_the_run_that_there_is_and_other_commands_as_they_are():
    assert resumed(["hpctrain", "train", "a.toml"])[3:] == ["--set", "checkpoint.resume=auto"]
    assert resumed(["python", "a.py"]) == ["python", "a.py"]
    assert num_places("a:2,b,c:3") == 6


@pytest.mark.parametrize(("fails", "restart", "code", "runs"), [(2, 3, 0, 3), (9, 1, 3, 2)])
def test_what_fails_is_started_so_often(tmp_path, fails, restart, code, runs):
    note = tmp_path / "runs"
    body = f"""
import sys
with open({str(note)!r}, "a+") as file:
    file.write("x")
    file.seek(0)
    sys.exit(3 * (len(file.read()) <= {fails}))
"""
    line = [sys.executable, "-m", "hpctrain", "launch", "-n", "1", "--restart", str(restart)]
    done = ended([*line, "--", sys.executable, "-c", body], timeout=100)
    assert done.returncode == code, done.stderr
    assert len(note.read_text()) == runs


def step_of(metrics):
    return max((r.get("step", 0) for r in read(metrics)), default=0) if metrics.exists() else 0


@pytest.mark.requires("cluster")
@pytest.mark.limit(200)
def test_a_node_that_is_lost_with_its_daemon_is_left_out(tmp_path, monkeypatch):
    """A run of ``hpctrain train`` goes on from its checkpoint on the other node."""
    monkeypatch.chdir(tmp_path)
    own = {"PYTHONPATH": str(ROOT), "TMPDIR": "/var/tmp", "OMP_NUM_THREADS": "1"}  # of each node
    for name, value in (mpiexec.environment() | own).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "slow.py").write_text(SLOW)
    write_config(tmp_path, "slow:model", epochs=8)
    metrics = tmp_path / "run/metrics.jsonl"
    with VirtualCluster(nodes=2) as cluster:
        options = {
            "--prtemca": f"plm_ssh_agent {AGENT} prte_if_include {cluster.network} "
            "plm_ssh_no_tree_spawn 1 prte_silence_shared_fs 1",
            "--mca": f"pml ob1 btl self,sm,tcp btl_tcp_if_include {cluster.network}",
        }
        words = [
            f"{kind} {name} {value}"
            for kind, text in options.items()
            for name, value in batched(text.split(), 2)
        ]
        launch = ["-n", "4", "--hosts", "n0:2,n1:2", "--restart", "1"]
        train = ["hpctrain", "train", "small.toml"]
        keys = ["--set", "output_dir=run", "--set", "checkpoint.every=4"]
        line = [str(BIN["openmpi"] / "python"), "-m", "hpctrain", "launch", *launch]
        line += ["--mpi-args", " ".join(words), "--", *train, *keys]
        process = cluster.start_on("login", line)
        assert wait_until(lambda: step_of(metrics) >= 6, 100)
        cluster.lose("n1")
        assert wait_until(lambda: any(r["event"] == "resumed" for r in read(metrics)), 100)
        said = process.communicate(timeout=100)[1]
    assert process.returncode == 0, said
    assert "2 start again on n0:2" in said
    records = read(metrics)
    assert records[-1]["event"] == "finished"
    assert [r["world_size"] for r in records if r["event"] in ("started", "resumed")] == [4, 2]


def batched(values, size):
    return zip(*[iter(values)] * size, strict=True)
