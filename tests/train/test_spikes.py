"""All ranks respond identically to a spike of the loss or a step that is not finite."""

from itertools import pairwise

import pytest
import torch

from hpctrain.core.errors import ConfigError, NotFiniteError
from hpctrain.core.records import read
from hpctrain.train.loop import Outcome
from tests.train.job import Job, assert_same_run
from tests.train.test_finite import FLAWED, GRADIENT, hashes

SPIKED = [
    "model.target=tests.train.problem:spiking_model",
    "model.args.sample=48",  # a sample of steps 5 and 8
    "train.epochs=2",
    "train.spike_window=4",
    "train.spike_deviations=30",
    "train.snapshot_every=3",
    "log.hash_every=1",
    "log.every_steps=1",
    "schedule.name=constant",  # the hash includes the learning rate
    "checkpoint.every=none",
]
ANY, TWO = pytest.mark.ranks(1, 3), pytest.mark.ranks(2)


def output(job: Job, event: str) -> list[dict]:
    job.here.comm.barrier()
    return [r for r in read(job.directory.metrics) if r["event"] == event]


def same_as_before(job: Job) -> set[int]:
    """Return the steps that changed nothing."""
    return {number for number, (a, b) in enumerate(pairwise(hashes(job)), 2) if a == b}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("overrides", [[], ["train.shard=node"]], ids=["", "shared parameters"])
def test_all_ranks_skip_a_spike_and_report_its_samples(here, configure, shared, overrides, caplog):
    job = Job(here, configure, shared / "run", *SPIKED, "train.on_spike=skip", *overrides)
    assert isinstance(job.part(), Outcome)
    spikes = output(job, "spike")
    assert [r["step"] for r in spikes] == [5, 8]  # batches are the same on any number of ranks
    assert same_as_before(job) == {5, 8}
    for record in spikes:
        assert record["loss"] > 30 > record["limit"] > 0
        assert sorted(r["rank"] for r in record["ranks"]) == [*range(here.comm.size)]
        batch = sorted(sample for r in record["ranks"] for sample in r["samples"])
        assert 48 in batch
        assert len(set(batch)) == len(batch) == 9
    lines = [r["step"] for r in output(job, "step") if r.get("skipped") == 1]
    assert lines == [5, 8]
    message = "step 8 (epoch 2): loss "
    assert caplog.text.count(message) == (here.comm.rank == 0)


@ANY
def test_a_falling_loss_has_no_spikes(here, configure, shared):
    job = Job(here, configure, shared / "run", *SPIKED, "train.on_spike=skip")
    plain = ["model.target=tests.train.problem:model", "model.args={}"]
    job.config = configure(*job.overrides, *plain)
    assert isinstance(job.part(), Outcome)
    assert output(job, "spike") == []


BACK = {
    "spike": [*SPIKED, "train.on_spike=rollback"],
    "shared parameters": [*SPIKED, "train.on_spike=rollback", "train.shard=node"],
    "reproducible": [*SPIKED, "train.on_spike=rollback", "train.reproducible=true"],
    "gradient": [
        *(*SPIKED, *FLAWED, GRADIENT, "checkpoint.every=none"),
        "train.on_non_finite=rollback",
        "train.ema=0.9",
        "optimizer.name=AdamW",
        "optimizer.args={}",
    ],
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("how", BACK)
def test_all_ranks_roll_back_to_a_snapshot(here, configure, shared, how):
    job = Job(here, configure, shared / "run", *BACK[how])
    task, drawn = job.built(), []
    task.optimizer.register_step_pre_hook(lambda *_: drawn.append(torch.get_rng_state()))
    assert isinstance(job.part(task=task), Outcome)
    event = "not_finite" if how == "gradient" else "spike"
    found = output(job, event)
    assert [(r["step"], r["action"], r["skipped"]) for r in found] == [
        (5, "rollback", 2),  # steps 4 and 5, because the snapshot was taken before step 4
        (8, "rollback", 2),
    ]
    left = [None, *hashes(job)]
    assert left[5] == left[3]
    assert left[8] == left[6]
    assert left[6] != left[4]
    assert len({*left}) == len(left) - 2
    finished = output(job, "finished")[0]
    assert finished["skipped"] == 4
    assert int(job.final()["model"]["network.0.num_batches_tracked"]) == 8
    assert how == "gradient" or task.model.passes.item() == 8
    # Random generators are restored too, so step 9 draws the numbers of step 7.
    if how == "spike":
        assert torch.equal(drawn[5], drawn[6])


@ANY
def test_the_rate_is_lowered_at_once_and_rises_again(here, configure, shared):
    lower = ["train.on_spike=lower_rate", "train.lowered_steps=4", "train.lowered_rate=0.2"]
    job = Job(here, configure, shared / "run", *SPIKED, *lower)
    job.config = configure(*job.overrides, "train.epochs=4")
    task, taken = job.built(), []
    task.optimizer.register_step_pre_hook(
        lambda *_: taken.append(task.optimizer.param_groups[0]["lr"])
    )
    assert isinstance(job.part(task=task), Outcome)
    spikes = output(job, "spike")
    expected, since = [], 4
    for step in range(1, 25):
        since = 0 if step in {r["step"] for r in spikes} else since + 1
        expected.append(0.05 * (0.2 + 0.8 * min(since, 4) / 4))
    assert spikes
    assert {r["action"] for r in spikes} == {"lower_rate"}
    assert taken == pytest.approx(expected)
    assert [r["lr"] for r in output(job, "step")] == pytest.approx(expected)


@TWO
@pytest.mark.parametrize("how", ["skip", "lower_rate"])
def test_a_resumed_run_finds_the_same_spikes(here, configure, shared, how):
    jobs = [
        Job(here, configure, shared / name, *SPIKED, f"train.on_spike={how}")
        for name in ("whole", "parts")
    ]
    for job, after in zip(jobs, (0, 6), strict=True):
        if after:
            job.part(stop="SIGUSR1", after=after - (how == "skip"))
        job.part()
    assert len(output(jobs[1], "spike")) > 1
    assert_same_run(*jobs)


@ANY
@pytest.mark.parametrize("how", ["spike", "gradient"])
def test_too_many_skipped_steps_end_all_ranks(here, configure, shared, how):
    job = Job(here, configure, shared / "run", *BACK[how], "train.max_skips=3")
    with pytest.raises(
        NotFiniteError, match=r"exceed train.max_skips = 3, but 4 steps were skipped"
    ):
        job.part()
    here.comm.barrier()
    assert read(job.directory.metrics)[-1]["event"] == "failed"


@TWO
def test_steps_skipped_on_one_rank_count_too(here, configure, shared):
    more = ["sync.method=local_sgd", "train.on_non_finite=skip", "train.max_skips=1"]
    job = Job(here, configure, shared / "run", *FLAWED, *more)
    with pytest.raises(NotFiniteError, match=r"exceed train.max_skips = 1"):
        job.part()


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.on_spike=skip", "sync.method=local_sgd"],
        ["train.on_non_finite=rollback", "sync.method=diloco"],
        ["train.on_spike=rollback", "parallel.zero=1", "parallel.offload=cpu"],
    ],
)
def test_incompatible_options_are_rejected_before_a_run(configure, overrides):
    with pytest.raises(ConfigError, match=r"train\.on_"):
        configure(*overrides)
