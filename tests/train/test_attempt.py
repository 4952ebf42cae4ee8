"""Each part of a run says which it is, in which job, and why the one before has ended."""

from types import SimpleNamespace

import pytest

from hpctrain.train.attempts import KILLED, Attempt
from hpctrain.train.config import RunConfig
from hpctrain.train.run import _requests
from hpctrain.train.run_directory import RunDirectory

STARTED = {"event": "started", "part": 1}
STEP = {"event": "step", "step": 3}
STOP = {"event": "stopped", "step": 4, "reason": "SIGUSR1, budget"}


@pytest.fixture(autouse=True)
def job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")


def test_the_first_part_follows_on_nothing():
    part = Attempt.after([])
    assert part == Attempt(part=1, ended_by=None, job="17", restarts=2)


@pytest.mark.parametrize(
    ("records", "ended_by"),
    [
        ([STARTED, STEP, STOP], "SIGUSR1, budget"),
        ([STARTED, STEP], KILLED),
        ([STARTED], KILLED),
    ],
)
def test_the_next_part_knows_why_the_one_before_has_ended(records, ended_by):
    assert Attempt.after(records) == Attempt(part=2, ended_by=ended_by, job="17", restarts=2)


def test_parts_are_counted_over_all_jobs(monkeypatch):
    records = [STARTED, STOP, {"event": "resumed", "part": 2}, STEP]
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    assert Attempt.after(records) == Attempt(part=3, ended_by=KILLED, job="", restarts=0)


def test_runs_from_before_parts_were_counted_go_on():
    assert Attempt.after([{"event": "started"}, STOP]).part == 2


def test_it_is_told_in_one_line():
    text = Attempt.after([STARTED, STOP]).describe()
    assert text == (
        "part 2 of the run in job 17, restart 2: the part before was stopped by SIGUSR1, budget"
    )
    assert "without a word" in Attempt.after([STARTED, STEP]).describe()


def stop_of(tmp_path, rank):
    return _requests(RunConfig(), RunDirectory(tmp_path), 1000.0, SimpleNamespace(rank=rank))


def test_the_end_of_the_job_is_asked_for_by_rank_0_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000")
    assert stop_of(tmp_path, 0).reason == "budget"  # that was long ago
    assert not stop_of(tmp_path, 1).reason


def test_a_run_whose_slurm_does_not_answer_trains_and_warns(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not stop_of(tmp_path, 0).reason
    assert "cannot stop by itself before its job ends" in caplog.text
