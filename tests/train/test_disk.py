"""If a checkpoint cannot be written, the run continues without that checkpoint."""

import resource
import shutil

import pytest

from hpctrain.core.errors import MismatchError
from hpctrain.core.libc import exchange_names
from hpctrain.train.loop import Outcome
from tests.train.job import Job, assert_same_run

WIDE = ["train.epochs=3", "model.args.width=600", "checkpoint.every=3", "log.plots=false"]
ROOM = 30_000  # bytes of a file: more than all records, less than the weights

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Retry a failed checkpoint at the next step."""
    monkeypatch.setattr("hpctrain.train.boundary.RETRY_S", 0.0)


@pytest.fixture
def fill():
    """Function that simulates a full disk for this process, or ends that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda full: resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM if full else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def steps_in(job: Job) -> list[str]:
    return sorted(path.name for path in job.directory.checkpoints.glob("step-????????"))


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_full_disk_is_a_warning_and_earlier_checkpoints_are_kept(
    here, configure, shared, caplog, fill, background
):
    overrides = [*WIDE, f"checkpoint.background={background}"]
    whole = Job(here, configure, shared / "whole", *overrides)
    whole.part()
    job = Job(here, configure, shared / "run", *overrides)
    seen = []
    # The checkpoint of step 3 is complete when that of step 6 starts.
    full = {7: lambda: fill(True), 12: lambda: seen.extend(steps_in(job)), 13: lambda: fill(False)}
    if background == "true":
        assert isinstance(job.part(at=full), Outcome)
    else:
        with pytest.raises(KeyError):
            job.part(at=full, after=14, fail=True)
        assert isinstance(job.part(), Outcome)
    here.comm.barrier()
    assert "step-00000003" in seen
    assert "step-00000009" not in seen
    output = "training continues without this checkpoint" in caplog.text
    assert output == ("File too large" in caplog.text) == (here.comm.rank == 0)
    assert steps_in(job)[-1] == steps_in(whole)[-1]
    assert_same_run(whole, job)


def test_a_failed_checkpoint_is_repeated_after_a_delay(here, configure, shared, fill, monkeypatch):
    monkeypatch.setattr("hpctrain.train.boundary.RETRY_S", 1e6)
    job, seen = Job(here, configure, shared / "run", *WIDE, "checkpoint.background=false"), []
    at = {7: lambda: fill(True), 10: lambda: fill(False), 17: lambda: seen.extend(steps_in(job))}
    assert isinstance(job.part(at=at), Outcome)
    assert seen == ["step-00000003", "step-00000006"]


def test_a_disk_that_rejects_the_last_checkpoint_is_an_error_on_all_ranks(
    here, configure, shared, fill
):
    job = Job(here, configure, shared / "run", *WIDE)
    with pytest.raises(
        MismatchError, match=r"too large.*\nthen continue from step-0000000[36] with"
    ):
        job.part(at={7: lambda: fill(True)})


@pytest.mark.parametrize("way", ["vanishes", "is taken"])
def test_a_run_continues_while_its_directory_is_missing(here, configure, shared, way, caplog):
    whole = Job(here, configure, shared / "whole", *WIDE)
    whole.part()
    job = Job(here, configure, shared / "run", *WIDE)
    place, away = job.directory.checkpoints, shared / "away"

    def leave():
        here.comm.barrier()
        if here.comm.rank == 0 and way == "vanishes":
            while place.exists():  # repeat, because a checkpoint may be in progress
                shutil.rmtree(place, ignore_errors=True)
        elif here.comm.rank == 0:
            away.touch()
            # atomically, because a checkpoint may be in progress
            assert exchange_names(away, place)
        here.comm.barrier()

    def come_back():
        here.comm.barrier()
        if here.comm.rank == 0 and way == "is taken":
            assert exchange_names(away, place)
        here.comm.barrier()

    assert isinstance(job.part(at={5: leave, 11: come_back}), Outcome)
    here.comm.barrier()
    if way == "is taken" and here.comm.rank == 0:
        assert "training continues without this checkpoint" in caplog.text
    assert steps_in(job)[-1] == steps_in(whole)[-1]
    assert_same_run(whole, job)
