"""``hpctrain launch --restart`` starts a failed program again, on the remaining hosts."""

import signal
import subprocess
import sys
import time

import pytest

from hpctrain.core.records import read
from hpctrain.launch import mpiexec
from tests.cluster.vcluster import VirtualCluster
from tests.cluster.vcluster.cluster import AGENT, BIN
from tests.harness import preload
from tests.harness.pace import scaled
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


def counting(note, ends):
    """Return a program that counts its runs in a file and executes ``ends``."""
    body = f"""
import os, signal, sys, time
with open({str(note)!r}, "a+") as file:
    file.write("x")
    file.seek(0)
    number = len(file.read())
{ends}
"""
    return [*preload.python(), "-c", body]


LAUNCH = [sys.executable, "-m", "hpctrain", "launch", "-n", "1"]


@pytest.mark.parametrize(
    ("restart", "ends", "code", "runs"),
    [
        (3, "sys.exit(3 * (number < 3))", 0, 3),
        (1, "sys.exit(3)", 3, 2),
        # exit code 2: a mistake of the user, which a restart does not fix
        (3, "sys.exit(2)", 2, 1),
        # exit code 85: the run wants to resume in another job
        pytest.param(3, "sys.exit(85)", 85, 1, marks=pytest.mark.conformance),
        (1, "import hpctrain; hpctrain.init(); os._exit(0)", 87, 2),
        (1, "import hpctrain; hpctrain.init(); hpctrain.shutdown()", 0, 1),
    ],
)
def test_a_failed_program_is_restarted_up_to_the_limit(tmp_path, restart, ends, code, runs):
    note = tmp_path / "runs"
    done = ended([*LAUNCH, "--restart", str(restart), *counting(note, ends)], timeout=100)
    assert done.returncode == code, done.stderr
    assert len(note.read_text()) == runs


def test_the_timeout_covers_all_runs_together(tmp_path):
    note, limit_s = tmp_path / "runs", scaled(12)
    ends = f"time.sleep({limit_s * 2 / 3}); sys.exit(3 if number == 1 else 0)"
    options = ["--restart", "9", "--timeout", str(limit_s)]
    done = ended([*LAUNCH, *options, *counting(note, ends)], timeout=limit_s + 60)
    assert done.returncode == 124, done.stderr
    assert note.read_text() in {"x", "xx"}


def test_a_launch_that_is_ended_by_a_signal_does_not_restart(tmp_path):
    note = tmp_path / "runs"
    line = [*LAUNCH, "--restart", "3", *counting(note, "time.sleep(50)")]
    with subprocess.Popen(line, stdin=subprocess.DEVNULL) as process:
        assert wait_until(note.exists, 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    assert note.read_text() == "x"


def test_a_restart_does_not_resume_a_run_of_another_launch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_config(tmp_path, "tests.train.problem:model", epochs=1)
    train = ["hpctrain", "train", "small.toml", "--set", "output_dir=run"]
    train = [*preload.python(), "-m", *train]
    assert ended(train, timeout=100).returncode == 0
    done = ended([*LAUNCH, "--restart", "1", *train], timeout=100)
    assert done.returncode == 2, done.stderr
    assert "start again" not in done.stderr


def step_of(metrics):
    return max((r.get("step", 0) for r in read(metrics)), default=0) if metrics.exists() else 0


def has_resumed(metrics):
    return any(record["event"] == "resumed" for record in read(metrics))


@pytest.mark.conformance
@pytest.mark.requires("cluster")
@pytest.mark.limit(400)
@pytest.mark.parametrize(("gone", "left"), [("n1", "n0"), ("n0", "n1")])
def test_a_lost_node_is_left_out_of_the_restart(tmp_path, monkeypatch, gone, left):
    """The run resumes on the other node, half a minute later if the lost node had the lease."""
    monkeypatch.chdir(tmp_path)
    # local to each node
    own = {"PYTHONPATH": str(ROOT), "TMPDIR": "/var/tmp", "OMP_NUM_THREADS": "1"}
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
        cluster.lose(gone)
        lost = time.monotonic()
        assert wait_until(lambda: has_resumed(metrics) or process.poll() is not None, 200)
        sys.__stderr__.write(f"without {gone} it goes on after {time.monotonic() - lost:.1f} s\n")
        message = process.communicate(timeout=200)[1]
    assert process.returncode == 0, message
    assert f"2 ranks start again on {left}:2" in message
    records = read(metrics)
    assert records[-1]["event"] == "finished"
    assert [r["world_size"] for r in records if r["event"] in ("started", "resumed")] == [4, 2]


def batched(values, size):
    return zip(*[iter(values)] * size, strict=True)
