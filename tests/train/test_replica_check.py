"""Ranks that have parted end the run at the next look."""

import pytest

from hpctrain.core.errors import MismatchError, ReplicaError
from hpctrain.core.records import read
from hpctrain.train.loop import Outcome
from tests.train.job import Job

SHORT = ["train.epochs=1", "checkpoint.every=none"]


@pytest.fixture
def no_samples(monkeypatch):
    """Leave out the sample of the weights that each step compares, which would find it before."""
    monkeypatch.setenv("HPCTRAIN_CHECK_WEIGHTS", "off")


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("every", "step"), [("test", 6), ("2", 4), ("never", None)])
@pytest.mark.usefixtures("no_samples")
def test_a_change_of_one_weight_on_one_rank_ends_all_ranks(here, configure, shared, every, step):
    parting = ["model.target=tests.train.problem:Parting", f"train.check_replicas={every}"]
    job = Job(here, configure, shared / "run", *SHORT, *parting)
    if step is None:
        assert isinstance(job.part(), Outcome)
        return
    last = here.comm.size - 1
    with pytest.raises(ReplicaError, match=rf"network\.4\.weight \(ranks? 0.*; rank {last}: "):
        job.part()
    here.comm.barrier()
    record = read(job.directory.metrics)[-1]
    assert (record["event"], record["step"]) == ("failed", step)


@pytest.mark.ranks(2)
def test_a_step_finds_it_too(here, configure, shared):
    parting = ["model.target=tests.train.problem:Parting", "train.check_replicas=never"]
    job = Job(here, configure, shared / "run", *SHORT, *parting)
    with pytest.raises(MismatchError, match=r"parted before step .*network\.4\.weight"):
        job.part()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "overrides",
    [
        ["model.args={dropout = 0.3, norm = true}"],
        ["train.reproducible=true", "model.args.norm=true"],
        ["sync.method=post_local_sgd", "sync.steps=2", "sync.args.start=2"],
    ],
    ids=["plain", "reproducible", "post"],
)
def test_runs_whose_ranks_agree_go_on(here, configure, shared, overrides):
    job = Job(here, configure, shared / "run", *SHORT, *overrides, "train.check_replicas=1")
    assert isinstance(job.part(), Outcome)
