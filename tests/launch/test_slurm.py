"""What Slurm is asked about a job, with a ``squeue`` that answers as the real one does."""

import time

import pytest

from hpctrain.core.errors import LaunchError
from hpctrain.launch.slurm import scheduler
from hpctrain.launch.slurm.scheduler import job_end, restart_count, time_limit_s


@pytest.fixture
def environ(tmp_path):
    """Make the environment of job 17, with a squeue that runs some lines of shell."""

    def make(script: str, **more: str) -> dict[str, str]:
        squeue = tmp_path / "squeue"
        squeue.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\n{script}\n')
        squeue.chmod(0o755)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17", **more}

    return make


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:07", 7),
        ("3:00", 180),
        ("2:03:04", 7384),
        ("1-00:00:01", 86401),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_a_time_left_is_read_as_slurm_writes_it(text, seconds):
    assert time_limit_s(text) == seconds


def test_a_newer_slurm_says_the_end_itself_and_is_not_asked(environ, tmp_path):
    assert job_end(environ("exit 1", SLURM_JOB_END_TIME="1234")) == 1234.0
    assert not (tmp_path / "asked").exists()


def test_an_older_one_is_asked_for_the_time_left_of_this_job(environ, tmp_path):
    before = time.time()
    end = job_end(environ("echo '17 10:00'"))
    assert before + 600 <= end <= time.time() + 600
    assert "-j 17 " in (tmp_path / "asked").read_text()


def test_the_other_tasks_of_an_array_do_not_count(environ):
    before = time.time()
    end = job_end(environ("echo '18 3:00'; echo '17 10:00'; echo '19 1:00'"))
    assert before + 600 <= end <= time.time() + 600


def test_a_job_without_a_limit_and_no_job_have_no_end(environ, tmp_path):
    assert job_end(environ("echo '17 UNLIMITED'")) is None
    (tmp_path / "asked").unlink()
    assert job_end({"PATH": str(tmp_path)}) is None
    assert not (tmp_path / "asked").exists()


def test_a_slurm_that_does_not_answer_is_an_error_with_its_words(environ, monkeypatch):
    refuses = environ("echo 'slurm_load_jobs error: Unable to contact controller' >&2; exit 1")
    with pytest.raises(LaunchError, match="squeue: slurm_load_jobs error: Unable to contact"):
        job_end(refuses)
    monkeypatch.setattr(scheduler, "ANSWER_S", 0.2)
    with pytest.raises(LaunchError, match="timed out after"):
        job_end(environ("exec sleep 20"))
    with pytest.raises(LaunchError, match="squeue in PATH"):
        job_end({"PATH": "/nowhere", "SLURM_JOB_ID": "17"})


def test_restarts_are_counted_from_0():
    assert restart_count({}) == 0
    assert restart_count({"SLURM_RESTART_COUNT": "3"}) == 3
