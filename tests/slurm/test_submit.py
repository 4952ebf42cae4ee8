"""``hpctrain submit`` on a running Slurm."""

import re

import pytest

from tests.slurm import training

pytestmark = [pytest.mark.launches, pytest.mark.requires("slurm"), pytest.mark.limit(180)]


@pytest.fixture
def submit(slurm, tmp_path):
    def run(*words, check=True):
        return slurm.run(["hpctrain", "submit", *map(str, words)], cwd=tmp_path, check=check)

    return run


def number_of(done):
    return int(re.match(r"job (\d+): ", done.stdout)[1])


def test_a_rejection_by_slurm_is_reported_in_its_words_and_nothing_is_queued(slurm, submit, tiny):
    done = submit(tiny, "--nodes", 9, check=False)
    assert done.returncode == 1
    assert "sbatch reports: allocation failure: Requested node" in done.stderr
    done = submit(tiny, "--partition", "nowhere", check=False)
    assert "invalid partition specified: nowhere" in done.stderr
    assert slurm.run(["squeue", "-h", "-n", "tiny"]).stdout == ""
    assert not (tiny.parent / "run").exists()


def test_a_dry_run_is_checked_by_slurm_and_not_queued(slurm, submit, tiny):
    before = slurm.run(["sbatch", "--parsable", "--hold", "--wrap", "true"]).stdout.strip()
    words = ["--nodes", 2, "--array", "0-1", "--after", before, "--requeue"]
    done = submit(tiny, "--dry-run", *words)
    slurm.run(["scancel", before])
    assert "the job would start at 2" in done.stderr
    assert "on nodes n[0-1]" in done.stderr
    assert done.stdout.startswith("#!/bin/bash\n")
    assert slurm.run(["squeue", "-h", "-n", "tiny"]).stdout == ""
    assert not (tiny.parent / "run").exists()


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_dependent_jobs_and_arrays_train_to_the_end(slurm, submit, tmp_path):
    """One run in two jobs, the second of which waits for the first, and an array of two runs."""
    config = training.write(tmp_path, epochs=2)
    small = ["--tasks", 1, "--set", "model.args.step_s=0.01", "--time", "10min"]
    alone = ["--nodes", 1, "--array", "0-1", "--no-check"]
    array = submit(config, "--name", "both", *alone, *small)
    long = ["--nodes", 2, "--set", "train.epochs=30", *small]
    first = submit(config, *long, "--set", "stop.after=1s")
    refused = submit(config, *long, check=False)
    second = submit(config, *long, "--no-check", "--after", f"afterany:{number_of(first)}")
    assert refused.returncode == 2
    assert f"job {number_of(first)} waits or runs" in refused.stderr

    job = slurm.job(number_of(second))
    assert job.wait(240) == "COMPLETED", job.output()
    assert "is finished" in slurm.run(["hpctrain", "status", tmp_path / "run"]).stdout
    assert slurm.job(number_of(first)).exit_code() == 85  # stopped by its time budget
    for done in (first, second):
        assert "2 on 2 nodes" in (tmp_path / f"run/slurm-{number_of(done)}.out").read_text()
    tasks = slurm.job(number_of(array)).tasks()  # in any order
    assert len(tasks) == 2
    for task in tasks:
        assert task.wait() == "COMPLETED", task.output()
    for index in range(2):
        folder = tmp_path / f"runs/both/{index}"
        assert "is finished" in slurm.run(["hpctrain", "status", folder]).stdout
    assert len(list((tmp_path / "runs/both").glob("slurm-*_[01].out"))) == 2
