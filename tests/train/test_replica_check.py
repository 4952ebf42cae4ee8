"""Diverged replicas end the run at the next comparison."""

import pytest
import torch

from hpctrain.core.errors import MismatchError, ReplicaError
from hpctrain.core.records import read
from hpctrain.train.loop import Outcome
from tests.train.job import Job

SHORT = ["train.epochs=1", "checkpoint.every=none"]


@pytest.fixture
def no_samples(monkeypatch):
    """Disable the comparison of sampled weights in steps, which would find the change first."""
    monkeypatch.setenv("HPCTRAIN_CHECK_WEIGHTS", "off")


@pytest.fixture
def warned(monkeypatch):
    """Make a difference found in a step a warning, as ``hpctrain train`` does with heal."""
    monkeypatch.setenv("HPCTRAIN_CHECK_WEIGHTS", "warn")


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("every", "step"), [("test", 6), ("2", 4), ("never", None)])
@pytest.mark.usefixtures("no_samples")
def test_a_change_of_one_weight_on_one_rank_ends_all_ranks(here, configure, shared, every, step):
    parting = ["model.target=tests.train.problem:Parting", f"train.check_replicas={every}"]
    job = Job(here, configure, shared / "run", *SHORT, *parting)
    if step is None:  # "never": the checkpoint still compares replicas
        with pytest.raises(MismatchError, match=r"network\.4\.weight \(ranks 0-1 differs"):
            job.part()
        return
    last = here.comm.size - 1
    with pytest.raises(ReplicaError, match=rf"network\.4\.weight \(ranks? 0.*; rank {last}: "):
        job.part()
    here.comm.barrier()
    record = read(job.directory.metrics)[-1]
    assert (record["event"], record["step"]) == ("failed", step)


@pytest.mark.ranks(2)
def test_the_comparison_in_each_step_finds_a_change(here, configure, shared):
    parting = ["model.target=tests.train.problem:Parting", "train.check_replicas=never"]
    job = Job(here, configure, shared / "run", *SHORT, *parting)
    with pytest.raises(MismatchError, match=r"differ before step .*network\.4\.weight"):
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
def test_runs_with_identical_replicas_continue(here, configure, shared, overrides):
    job = Job(here, configure, shared / "run", *SHORT, *overrides, "train.check_replicas=1")
    assert isinstance(job.part(), Outcome)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("every", ["1", "test"])
@pytest.mark.usefixtures("warned")
def test_a_diverged_rank_is_healed_and_the_run_continues(here, configure, shared, every):
    """With a comparison of all weights after each step, or of sampled weights in each step."""
    heal = ["train.on_divergence=heal", f"train.check_replicas={every}"]
    parting = ["model.target=tests.train.problem:Parting", *heal]
    jobs = [
        Job(here, configure, shared / name, *SHORT, *more)
        for name, more in (("plain", []), ("healed", parting))
    ]
    for job in jobs:
        assert isinstance(job.part(), Outcome)
    plain, healed = (job.final()["model"] for job in jobs)
    for name, value in plain.items():
        other = healed[f"network.{name}"]
        torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-6)
