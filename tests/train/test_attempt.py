"""Each part of a run says which it is, in which job, and why the one before has ended."""

from types import SimpleNamespace

import pytest

from hpctrain.train.attempts import FAILED, KILLED, Attempt
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


@pytest.mark.parametrize(
    ("records", "part", "ended_by"),
    [
        ([], 1, None),
        ([STARTED, STEP, STOP], 2, "SIGUSR1, budget"),
        ([STARTED, STEP], 2, KILLED),
        ([STARTED], 2, KILLED),
        ([STARTED, {"event": "failed"}], 2, FAILED),
        ([STARTED, STOP, {"event": "resumed", "part": 2}, STEP], 3, KILLED),
        ([{"event": "started"}, STOP], 2, "SIGUSR1, budget"),  # from before parts were counted
    ],
)
def test_a_part_knows_its_number_and_why_the_one_before_has_ended(records, part, ended_by):
    found = Attempt.after(records)
    assert found == Attempt(part=part, ended_by=ended_by, job="17", restarts=2)
    if ended_by is None:
        return  # which nobody describes
    text = found.describe()
    assert text.startswith(f"part {part} of the run in job 17, restart 2: the part before was ")
    assert text.endswith("without a word" if ended_by == KILLED else f"stopped by {ended_by}")


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
