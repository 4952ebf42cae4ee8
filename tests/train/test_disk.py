"""A disk that refuses a checkpoint costs that checkpoint, and no more."""

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
    """Let a checkpoint that failed be due at the next step again."""
    monkeypatch.setattr("hpctrain.train.boundary.RETRY_S", 0.0)


@pytest.fixture
def fill():
    """Fill the disk, and empty it, of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda full: resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM if full else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def steps_in(job: Job) -> list[str]:
    return sorted(path.name for path in job.directory.checkpoints.glob("step-????????"))


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_full_disk_is_a_warning_and_the_good_checkpoint_stays(
    here, configure, shared, caplog, fill, background
):
    overrides = [*WIDE, f"checkpoint.background={background}"]
    whole = Job(here, configure, shared / "whole", *overrides)
    whole.part()
    job = Job(here, configure, shared / "run", *overrides)
    seen = []
    # The checkpoint of step 3 is on disk when that of step 6 begins.
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
    told = "training continues without this checkpoint" in caplog.text
    assert told == ("File too large" in caplog.text) == (here.comm.rank == 0)
    assert steps_in(job)[-1] == steps_in(whole)[-1]
    assert_same_run(whole, job)


def test_a_disk_that_refuses_the_last_state_is_one_error_of_all_ranks(
    here, configure, shared, fill
):
    job = Job(here, configure, shared / "run", *WIDE)
    with pytest.raises(
        MismatchError, match=r"too large.*\nthen continue from step-0000000[36] with"
    ):
        job.part(at={7: lambda: fill(True)})


@pytest.mark.parametrize("way", ["vanishes", "is taken"])
def test_a_directory_that_is_gone_for_a_while_is_no_end(here, configure, shared, way, caplog):
    whole = Job(here, configure, shared / "whole", *WIDE)
    whole.part()
    job = Job(here, configure, shared / "run", *WIDE)
    place, away = job.directory.checkpoints, shared / "away"

    def leave():
        here.comm.barrier()
        if here.comm.rank == 0 and way == "vanishes":
            while place.exists():  # while a checkpoint is being written there
                shutil.rmtree(place, ignore_errors=True)
        elif here.comm.rank == 0:
            away.touch()
            assert exchange_names(away, place)  # at once: a checkpoint may be being written
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
