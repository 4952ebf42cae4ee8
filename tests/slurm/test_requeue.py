"""Runs that span several jobs have the same bits as a run in one job."""

import pytest

from tests.slurm.training import STEPS
from tests.slurm.watching import Run

SHAPE = ("--time=10", "--ntasks-per-node=2")
SMALL = ("--time=10", "--ntasks-per-node=1")

pytestmark = [pytest.mark.launches, pytest.mark.requires("slurm"), pytest.mark.limit(900)]


@pytest.fixture
def whole(slurm, tmp_path, request):
    """Start a reference run without stops; return a function that waits for its end."""
    shape = SHAPE if request.node.get_closest_marker("conformance") else SMALL
    run = Run(slurm, tmp_path / "whole", step_s=0.01, shape=shape)
    job = run.submit("multi_node")

    def finished() -> Run:
        assert job.wait(300) == "COMPLETED", job.output()
        return run

    return finished


def stop_three_times(run, job):
    """Send the signal that Slurm sends before the time limit, once in each of three parts."""
    for part in (1, 2, 3):
        run.wait_for_step(9 * part, part=part)
        job.signal("USR1")


def assert_one_run(run, whole):
    assert [r["step"] for r in run.records("step")] == list(range(1, STEPS + 1))
    assert run.curve() == whole.curve()
    assert run.records()[-1]["state_hash"] == whole.records()[-1]["state_hash"]


def test_a_stopped_job_is_requeued_and_resumes(slurm, tmp_path, whole):
    run = Run(slurm, tmp_path / "run", step_s=0.1, shape=SMALL)
    job = run.submit("requeue")
    run.wait_for_step(9)
    job.signal("USR1")
    assert job.wait(300) == "COMPLETED", job.output()
    assert_one_run(run, whole())
    first, second = run.parts()
    assert (first["part"], first["restarts"], first["ended_by"]) == (1, 0, None)
    assert (second["part"], second["restarts"], second["ended_by"]) == (2, 1, "SIGUSR1")
    assert first["job"] == second["job"] == str(job.id)
    # The run resumes at the step after which it was stopped.
    assert f"stopped by SIGUSR1 after step {second['step']} of {STEPS}" in job.output()
    assert f"part 2 of the run in job {job.id}, restart 1" in job.output()


@pytest.mark.conformance
def test_three_stops_in_one_run_keep_the_same_bits(slurm, tmp_path, whole):
    run = Run(slurm, tmp_path / "run", step_s=0.1)
    job = run.submit("requeue")
    stop_three_times(run, job)
    assert job.wait(500) == "COMPLETED", job.output()
    assert job.restarts() == 3
    assert_one_run(run, whole())
    assert [(p["part"], p["restarts"]) for p in run.parts()] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert job.output().count("\nstopped by SIGUSR1 after step") == 3


@pytest.mark.conformance
def test_a_preempted_job_resumes_without_loss(slurm, tmp_path, whole):
    run, reference = Run(slurm, tmp_path / "run", step_s=0.1), whole()
    job = run.submit("requeue", "--partition=low")
    run.wait_for_step(9)
    first = slurm.sbatch("--nodes=4", "--exclusive", "--wrap", "sleep 2")
    assert first.wait() == "COMPLETED"
    assert job.wait(300) == "COMPLETED", job.output()
    assert job.restarts() == 1
    assert_one_run(run, reference)
    assert [p["ended_by"] for p in run.parts()] == [None, "SIGUSR1"]
    assert f"stopped by SIGUSR1 after step {run.parts()[1]['step']}" in job.output()


@pytest.mark.conformance
def test_a_run_resumes_after_the_time_limit_of_its_job(slurm, tmp_path):
    # two ranks on one node and one on the other
    unequal = ("--nodes=2", "--ntasks=3")
    whole = Run(slurm, tmp_path / "whole", step_s=0.01)
    reference = whole.submit("multi_node", *unequal)
    by_clock = Run(slurm, tmp_path / "clock", step_s=3.0)
    by_signal = Run(slurm, tmp_path / "signal", step_s=3.0)
    # SIGCONT is no stop request, so the run stops itself at nine tenths of the time.
    jobs = [
        by_clock.submit("requeue", *unequal, "--time=2", "--signal=CONT@1"),
        by_signal.submit("requeue", *unequal, "--time=2", "--signal=USR1@60"),
    ]
    assert reference.wait() == "COMPLETED", reference.output()
    for run, job, reason in zip((by_clock, by_signal), jobs, ("budget", "SIGUSR1"), strict=True):
        assert job.wait(500) == "COMPLETED", job.output()
        assert_one_run(run, whole)
        assert {p["ended_by"] for p in run.parts()[1:]} == {reason}
        assert all((p["world_size"], p["nodes"]) == (3, 2) for p in run.parts())


@pytest.mark.conformance
def test_a_chain_of_three_jobs_is_one_run(slurm, tmp_path, whole):
    run = Run(slurm, tmp_path / "run", step_s=0.1)
    job = run.submit("chain", f"--job-name={tmp_path.name}")

    def links() -> list[int]:
        """Return the ids of the jobs of the chain, which share a name."""
        done = slurm.run(["squeue", "-h", "-t", "all", "-n", tmp_path.name, "-o", "%A"])
        return sorted(map(int, done.stdout.split()))

    for part in (1, 2):
        run.wait_for_step(10 * part, part=part)
        slurm.job(links()[part - 1]).signal("USR1")
    run.wait_for_step(21, part=3)
    jobs = [slurm.job(number) for number in links()]
    assert [job.wait() for job in jobs] == ["COMPLETED"] * 3, jobs[-1].output()
    assert_one_run(run, whole())
    assert [(p["part"], p["job"], p["ended_by"]) for p in run.parts()] == [
        (1, str(job.id), None),
        (2, str(jobs[1].id), "SIGUSR1"),
        (3, str(jobs[2].id), "SIGUSR1"),
    ]
