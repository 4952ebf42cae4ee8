"""The private Slurm keeps its word: jobs, their ends and requeues, and nothing left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import SlurmCluster, check, obstacle
from tests.cluster.slurm.mode import MODES
from tests.cluster.slurm.ports import BLOCK, Ports
from tests.cluster.slurm.settings import Place, Settings
from tests.cluster.vcluster.__main__ import SKIPPED

needs_slurm = [
    pytest.mark.requires("slurm", "cluster"),
    pytest.mark.launches,
    pytest.mark.limit(120),
]
GONE_S = 20.0
"""Time that the kernel gets to end all that a cluster has started."""


def of_cluster(directory: Path | str) -> list[str]:
    """List the processes that a cluster has started: each names its directory somewhere."""
    name = os.fsencode(directory)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if name in words and int(process.name) != os.getpid():
            found.append(words.replace(b"\0", b" ").decode()[:80])
    return found


def assert_gone(directory: Path | str) -> None:
    give_up = time.monotonic() + GONE_S
    while (left := of_cluster(directory)) or Path(directory).exists():
        assert time.monotonic() < give_up, left
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=3, cpus=2, gpus=2) as cluster:
        yield cluster


@pytest.mark.parametrize("mode", MODES)
class TestEveryMode:
    pytestmark = needs_slurm

    def test_runs_a_job_on_two_nodes_and_leaves_nothing(self, mode):
        with SlurmCluster(nodes=2, mode=mode) as cluster:
            assert cluster.states() == {"n0": "idle", "n1": "idle"}
            job = cluster.sbatch(
                "-N2", "--ntasks-per-node=2", "--wrap", "srun -l hostname; sleep 600 & exit 7"
            )
            assert job.wait() == "FAILED"
            assert (job.exit_code(), job.nodes(), job.restarts()) == (7, ["n0", "n1"], 0)
            hosts = sorted(line.split()[1] for line in job.output().splitlines())
            assert hosts == (["n0"] * 2 + ["n1"] * 2 if mode != "plain" else hosts[:1] * 4)
            running = cluster.sbatch("--wrap", "trap '' TERM USR1; sleep 600")
            running.wait_for("RUNNING")
            directory = cluster.directory
            assert of_cluster(directory)
        assert_gone(directory)

    def test_ends_with_its_owner(self, mode):
        owner = f"""
import time
from tests.cluster.slurm import SlurmCluster
with SlurmCluster(nodes=1, mode="{mode}") as cluster:
    cluster.sbatch("--wrap", "trap '' TERM; sleep 600").wait_for("RUNNING")
    print(cluster.directory, flush=True)
    time.sleep(600)
"""
        line = [sys.executable, "-c", owner]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
            directory = process.stdout.readline().strip()
            assert len(of_cluster(directory)) > 4
            process.kill()
        assert_gone(directory)


@pytest.mark.conformance
@pytest.mark.requires("slurm", "cluster")
@pytest.mark.launches
@pytest.mark.limit(200)
@pytest.mark.parametrize("mode", ["uts", "net"])
def test_a_power_cut_is_noticed_and_the_job_starts_elsewhere(mode):
    with SlurmCluster(nodes=3, mode=mode) as cluster:
        job = cluster.sbatch(*AGAIN, "-N2", "--wrap", f"srun hostname; {RERUN}")
        job.wait_for_output("run 0")
        first = job.nodes()
        cluster.kill_node(first[1])
        assert job.wait(150) == "COMPLETED"
        assert (job.restarts(), len(job.nodes())) == (1, 2)
        assert first[1] not in job.nodes()
        assert cluster.states()[first[1]] == "down*"
        cluster.restore_node(first[1])
        assert set(cluster.states().values()) == {"idle"}


AGAIN = ("--requeue", "--open-mode=append")
RERUN = "echo run ${SLURM_RESTART_COUNT:-0}; sleep $((SLURM_RESTART_COUNT ? 0 : 600))"


class TestJobs:
    pytestmark = needs_slurm

    def test_get_signals_and_say_how_they_ended(self, cluster, tmp_path):
        counting = cluster.sbatch(
            "--output=o",
            "--wrap",
            "srun sh -c 'trap \"echo caught; exit 85\" USR1; echo up; while :; do sleep .1; done'",
            cwd=tmp_path,
        )
        counting.wait_for_output("up")
        with pytest.raises(TimeoutError, match=r"RUNNING after 0 s(.|\n)*up"):
            counting.wait(timeout_s=0)
        counting.signal("USR1")
        assert counting.wait() == "FAILED"
        assert counting.exit_code() == 85
        assert {"up", "caught"} <= set((tmp_path / "o").read_text().splitlines())
        waiting = cluster.sbatch("--begin=now+1hour", "--wrap", "true")
        assert waiting.state() == "PENDING"
        waiting.cancel()
        assert waiting.wait() == "CANCELLED"
        with pytest.raises(TimeoutError, match="was to be RUNNING, and has ended CANCELLED"):
            waiting.wait_for("RUNNING")

    def test_of_an_array_have_numbers_of_their_own(self, cluster, tmp_path):
        array = cluster.sbatch("--array=1-3", "--wrap", "exit $SLURM_ARRAY_TASK_ID", cwd=tmp_path)
        while len(tasks := array.tasks()) < 3:
            time.sleep(0.1)
        assert [task.wait() for task in tasks] == ["FAILED"] * 3
        assert sorted(task.exit_code() for task in tasks) == [1, 2, 3]

    def test_are_refused_with_the_words_of_slurm(self, cluster):
        with pytest.raises(RuntimeError, match="invalid partition specified: nowhere"):
            cluster.sbatch("-p", "nowhere", "--wrap", "true")
        with pytest.raises(TimeoutError, match=r"took more than 0.5 s(.|\n)*here"):
            cluster.run(["sh", "-c", "echo here; sleep 60; true"], timeout_s=0.5)

    def test_see_gpus_that_are_none(self, cluster):
        show = "echo $SLURM_PROCID:$CUDA_VISIBLE_DEVICES"
        done = cluster.run(["srun", "-n2", "-N1", "--gpus-per-task=1", "sh", "-c", show])
        assert sorted(done.stdout.split()) == ["0:0", "1:1"]

    def test_go_on_after_a_requeue_and_a_lost_node(self, cluster):
        jobs = [cluster.sbatch(*AGAIN, f"-w{n}", "--wrap", RERUN) for n in ("n0", "n2")]
        for job in jobs:
            job.wait_for_output("run 0")
        jobs[0].requeue()
        cluster.kill_node("n2")
        cluster.set_down("n2")
        assert cluster.states()["n2"].startswith("down")
        assert jobs[0].wait() == "COMPLETED"
        assert jobs[1].state() == "PENDING"  # it asked for the node that is gone
        cluster.restore()
        assert set(cluster.states().values()) <= {"idle", "mixed", "allocated"}
        assert jobs[1].wait() == "COMPLETED"
        for job in jobs:
            assert job.restarts() == 1
            assert job.output().endswith("run 1\n")

    @pytest.mark.conformance
    def test_of_low_make_room_for_main_and_start_again(self, cluster):
        # Slurm takes one that ends by itself in its grace time for ended, and does not requeue it.
        low = cluster.sbatch(*AGAIN, "-plow", "-wn1", "-c2", "--wrap", f"trap '' TERM; {RERUN}")
        low.wait_for_output("run 0")
        assert cluster.sbatch("-wn1", "-c2", "--wrap", "true").wait() == "COMPLETED"
        assert low.wait() == "COMPLETED"
        assert low.restarts() == 1

    def test_of_two_clusters_do_not_see_each_other(self, cluster):
        with SlurmCluster(nodes=2) as other:
            jobs = [c.sbatch("-N2", "--wrap", "sleep 1; srun hostname") for c in (cluster, other)]
            assert [job.wait() for job in jobs] == ["COMPLETED", "COMPLETED"]
            assert sorted(other.states()) == ["n0", "n1"]
        assert sorted(jobs[0].output().split()) == ["n0", "n1"]


@pytest.mark.launches
@pytest.mark.limit(120)
@pytest.mark.requires("slurm-accounting")
def test_accounting_remembers_steps():
    with SlurmCluster(nodes=1, accounting=True) as cluster:
        job = cluster.sbatch("--wrap", "srun true")
        assert job.wait() == "COMPLETED"
        line = ["sacct", "-n", "-P", "-j", str(job.id), "-o", "JobID,State"]
        steps = ("", ".batch", ".0")
        give_up = time.monotonic() + 30
        while not all(f"{job.id}{s}|COMPLETED" in cluster.run(line).stdout for s in steps):
            assert time.monotonic() < give_up, cluster.run(line).stdout  # it lags a little
            time.sleep(0.1)


@pytest.mark.requires("slurm")
@pytest.mark.launches
@pytest.mark.limit(120)
def test_a_shell_has_a_cluster_until_it_is_asked_to_end():
    directory = Path(f"/tmp/slurm-shell.{os.getpid()}")
    tool = [sys.executable, "-m", "tests.cluster.slurm"]
    options = [f"--directory={directory}"]

    def do(*line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(line, capture_output=True, text=True, check=False)

    started = do(*tool, "up", *options, "--nodes=2")
    assert started.returncode == 0, started.stderr
    try:
        variable = started.stdout.removeprefix("export ").strip()
        assert do("env", variable, "srun", "-N2", "true").returncode == 0
        assert do(f"{directory}/on", "n1", "hostname").stdout == "n1\n"
        assert "no host n7: login n0 n1" in do(f"{directory}/on", "n7", "hostname").stderr
        assert "there already" in do(*tool, "up", *options).stderr
    finally:
        ended = do(*tool, "down", *options)
    assert ended.returncode == 0, ended.stderr
    assert of_cluster(directory) == []
    assert not directory.exists()
    assert do(*tool, "down", *options).returncode == 1


def test_check_says_what_is_missing_and_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "search_path", lambda: str(tmp_path))
    assert obstacle("plain").startswith("no slurmctld, slurmd, sbatch, munged")
    assert "apt-get install slurm-wlm munge" in obstacle("plain")
    assert "slurmdbd mariadb-server-core" in obstacle("plain", accounting=True)
    with pytest.raises(RuntimeError, match="no slurmctld"):
        SlurmCluster(mode="plain").__enter__()


@pytest.mark.requires("slurm")
def test_check_says_77_without_privileges():
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    line = [sys.executable, "-m", "tests.cluster.slurm", "check"]
    done = subprocess.run([*drop, *line], capture_output=True, text=True, check=False)
    assert done.returncode == SKIPPED, done.stdout + done.stderr
    assert "take root and CAP_SYS_ADMIN" in done.stdout


def test_a_path_too_long_for_sockets_is_refused(tmp_path):
    cluster = SlurmCluster(mode="plain", directory=tmp_path / ("d" * 60))
    with pytest.raises(RuntimeError, match=r"at most 60 letters(.|\n)*has \d+"), cluster:
        pass
    assert list(tmp_path.iterdir()) == []


def test_clusters_have_different_ports():
    one, other = Ports(), Ports()
    try:
        assert abs(one.first - other.first) >= BLOCK
        with pytest.raises(RuntimeError, match="64 free ports in a row"):
            Ports(one.first)
    finally:
        other.close()
        one.close()
    Ports(one.first).close()


def test_settings_name_every_node_and_what_it_has():
    place = Place(name="login", address="10.0.0.9", port=1)
    nodes = {f"n{k}": Place(name=f"n{k}", address=f"10.0.0.{k}", port=k + 4) for k in range(2)}
    settings = Settings(
        directory=Path("/tmp/s"), login=place, nodes=nodes, cpus=3, gpus=2, accounting=True
    )
    lines = settings.slurm_conf().splitlines()
    assert "SlurmctldHost=login(10.0.0.9)" in lines
    assert "NodeName=n1 NodeHostname=n1 NodeAddr=10.0.0.1 Port=5" in lines
    assert any(line.endswith("CPUs=3 RealMemory=4000 State=UNKNOWN Gres=gpu:2") for line in lines)
    assert "AccountingStoragePort=2" in lines
    assert settings.gres_conf() == "Name=gpu File=/tmp/s/dev/gpu[0-1]\n"
    assert "StoragePort=3" in settings.slurmdbd_conf().splitlines()
