"""``hpctrain submit -- python script.py`` on a running Slurm, with a stop of the script."""

import re
import time
from pathlib import Path

import pytest

from tests.cli.test_launch import DDP

pytestmark = [pytest.mark.launches, pytest.mark.requires("slurm"), pytest.mark.limit(400)]

LOOP = Path(__file__).parents[2] / "examples/own_loop.py"


@pytest.fixture
def submit(slurm, tmp_path):
    def run(*words):
        line = ["hpctrain", "submit", "--nodes", 2, "--tasks", 1, "--time", "10min", *words]
        done = slurm.run(list(map(str, line)), cwd=tmp_path, timeout_s=120)
        return slurm.job(int(re.match(r"job (\d+): ", done.stdout)[1]))

    return run


def wait_until(true, what, timeout_s=200):
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


@pytest.fixture
def status(slurm, tmp_path):
    """Function that returns exit code and output of ``hpctrain status`` of a run."""

    def ask(name):
        line = ["hpctrain", "status", f"runs/{name}"]
        done = slurm.run(line, cwd=tmp_path, check=False)
        return done.returncode, done.stdout

    return ask


def test_a_ddp_script_runs_unchanged_in_a_job_and_its_state_is_reported(
    slurm, submit, status, tmp_path
):
    (tmp_path / "ddp.py").write_text(DDP)
    held = submit("--name", "held", "--option=--hold", "--", "ddp.py")
    job = submit("--", "python", "ddp.py")
    code, message = status("held")
    assert (code, f"job {held.id} is PENDING, JobHeldUser" in message) == (3, True), message
    slurm.run(["scancel", str(held.id)])
    job.wait_for("RUNNING")
    assert status("ddp")[0] == 4
    assert job.wait(200) == "COMPLETED", job.output()
    lines = sorted(line for line in job.output().splitlines() if re.match(r"\d \d \d \d ", line))
    assert lines == ["0 2 0 1 2.0", "1 2 0 1 2.0"]
    assert status("ddp") == (0, "runs/ddp is finished: its program ended with code 0\n")


@pytest.mark.conformance
def test_a_preempted_loop_resumes_with_the_same_bits(slurm, submit, status, tmp_path):
    words = ("--", "python", LOOP, "--epochs", 120)
    job = submit("--name", "loop", "--requeue", "-p", "low", *words)
    saved = tmp_path / "runs/loop/checkpoints"
    wait_until(lambda: saved.is_dir() and any(saved.glob("step-*")), job.output)
    assert status("loop")[0] == 4
    urgent = slurm.sbatch("--nodes=4", "--exclusive", "--wrap", "sleep 1")
    assert urgent.wait(200) == "COMPLETED"
    whole = submit("--name", "whole", *words)
    assert whole.wait(200) == "COMPLETED", whole.output()
    assert job.wait(300) == "COMPLETED", job.output()
    assert job.restarts() == 1, job.output()
    begun = [int(step) for step in re.findall(r"begins at step (\d+) of", job.output())]
    assert begun[0] == 0 < begun[1], job.output()
    assert "asked to stop by SIGUSR1" in job.output()
    weights = [re.search("weights .*", each.output())[0] for each in (whole, job)]
    assert weights[0] == weights[1]
