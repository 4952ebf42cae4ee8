"""Check the private Slurm: jobs, their ends and requeues, and complete removal."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import SlurmCluster
from tests.cluster.slurm.cluster import BLOCK, ports

needs_slurm = [
    pytest.mark.requires("slurm", "cluster"),
    pytest.mark.launches,
    pytest.mark.limit(200),
]
WAIT_S = 60.0
"""Time that Slurm gets for anything, and the kernel to end all that a cluster has started."""

AGAIN = ("--requeue", "--open-mode=append")
RERUN = "echo run ${SLURM_RESTART_COUNT:-0}; sleep $((SLURM_RESTART_COUNT ? 0 : 600))"


def wait_until(holds: Callable[[], bool], why: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def of_cluster(directory: Path | str) -> list[str]:
    """Return the processes of a cluster, found by its directory in arguments or environment."""
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
    wait_until(
        lambda: not of_cluster(directory) and not Path(directory).exists(),
        lambda: of_cluster(directory),
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=3, cpus=2, gpus=2) as cluster:
        yield cluster


class TestCluster:
    pytestmark = needs_slurm

    def test_runs_jobs_next_to_another_cluster_and_leaves_nothing(self, cluster):
        with SlurmCluster(nodes=2) as other:
            assert other.states() == {"n0": "idle", "n1": "idle"}
            line = "srun -l hostname; sleep 600 & exit 7"
            jobs = [
                each.sbatch("-N2", "--ntasks-per-node=2", "--wrap", line)
                for each in (cluster, other)
            ]
            for job in jobs:
                assert job.wait() == "FAILED"
                assert (job.exit_code(), job.nodes(), job.restarts()) == (7, ["n0", "n1"], 0)
                hosts = sorted(line.split()[1] for line in job.output().splitlines())
                assert hosts == ["n0"] * 2 + ["n1"] * 2
            running = other.sbatch("--wrap", "trap '' TERM USR1; sleep 600")
            running.wait_for("RUNNING")
            directory = other.directory
            assert of_cluster(directory)
        assert_gone(directory)

    def test_ends_with_its_owner(self):
        owner = """
import time
from tests.cluster.slurm import SlurmCluster
with SlurmCluster(nodes=1) as cluster:
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
    def test_notices_a_power_cut_and_starts_the_job_elsewhere(self, cluster):
        job = cluster.sbatch(*AGAIN, "-N2", "--wrap", f"srun hostname; {RERUN}")
        wait_until(lambda: "run 0" in job.output(), job.output)
        first = job.nodes()
        cluster.kill_node(first[1])
        assert job.wait(150) == "COMPLETED"
        assert (job.restarts(), len(job.nodes())) == (1, 2)
        assert first[1] not in job.nodes()
        assert cluster.states()[first[1]] == "down*"
        cluster.restore()
        assert set(cluster.states().values()) == {"idle"}


class TestJobs:
    pytestmark = needs_slurm

    def test_get_signals_and_say_how_they_ended(self, cluster, tmp_path):
        counting = cluster.sbatch(
            "--output=o",
            "--wrap",
            "srun sh -c 'trap \"echo caught; exit 85\" USR1; echo up; while :; do sleep .1; done'",
            cwd=tmp_path,
        )
        wait_until(lambda: "up" in counting.output(), counting.output)
        with pytest.raises(TimeoutError, match=r"RUNNING after 0 s(.|\n)*up"):
            counting.wait(timeout_s=0)
        counting.signal("USR1")
        assert counting.wait() == "FAILED"
        assert counting.exit_code() == 85
        assert {"up", "caught"} <= set((tmp_path / "o").read_text().splitlines())
        with pytest.raises(TimeoutError, match="was to be RUNNING, and has ended FAILED"):
            counting.wait_for("RUNNING")

    def test_of_an_array_have_separate_numbers(self, cluster, tmp_path):
        array = cluster.sbatch("--array=1-3", "--wrap", "exit $SLURM_ARRAY_TASK_ID", cwd=tmp_path)
        wait_until(lambda: len(array.tasks()) == 3, array.facts)
        tasks = array.tasks()
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

    @pytest.mark.conformance
    def test_of_low_make_room_for_main_and_start_again(self, cluster):
        # Slurm treats a job that ends itself in its grace time as ended, and does not requeue it.
        low = cluster.sbatch(*AGAIN, "-plow", "-wn1", "-c2", "--wrap", f"trap '' TERM; {RERUN}")
        wait_until(lambda: "run 0" in low.output(), low.output)
        assert cluster.sbatch("-wn1", "-c2", "--wrap", "true").wait() == "COMPLETED"
        assert low.wait() == "COMPLETED"
        assert low.restarts() == 1


def test_clusters_have_different_ports():
    with ports() as one, ports() as other:
        assert abs(one - other) >= BLOCK
