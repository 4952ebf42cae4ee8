"""Options of [optimizer], [schedule] and [log] for large batches, in complete runs."""

import pytest
import torch
from torch.nn import functional

from hpctrain.core.errors import ConfigError
from hpctrain.core.records import read
from hpctrain.optim import LAMB, LARS
from hpctrain.train.loop import Outcome, Stopped
from hpctrain.train.task import build
from tests.train import problem
from tests.train.job import Job, assert_same_run

LARS_RUN = [
    "optimizer.name=LARS",
    "optimizer.args={ momentum_correction = true, weight_decay = 0.01, trust_coefficient = 0.1 }",
    "optimizer.exempt_norms_and_biases=true",
    "schedule.name=poly",
    "schedule.base_batch=3",
    "schedule.warmup_epochs=1",
]
LAMB_RUN = ["optimizer.name=LAMB", "optimizer.args={ betas = [0.9, 0.95] }"]
NOISE = ["log.noise_scale=true", "train.accumulate=2", "log.every_steps=3"]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("how", [LARS_RUN, LAMB_RUN], ids=["LARS", "LAMB"])
def test_a_resumed_run_has_the_same_bits_and_noise_scale(here, configure, shared, how):
    how = [*how, *NOISE, "model.target=tests.train.problem:noisy_model", "model.args.norm=false"]
    straight, parted = (Job(here, configure, shared / name, *how) for name in "ab")
    assert isinstance(straight.part(), Outcome)
    assert isinstance(parted.part(stop="SIGTERM", after=8), Stopped)
    assert isinstance(parted.part(), Outcome)
    assert_same_run(straight, parted)
    assert any("noise_scale" in record for record in read(straight.directory.metrics))


@pytest.mark.ranks(1, 2)
def test_exempt_norms_and_biases_are_not_adapted(here, configure):
    task = build(configure(*LARS_RUN, "model.args.norm=true"), here.comm)
    assert isinstance(task.optimizer, LARS)
    for group in task.optimizer.param_groups:
        is_exempt = all(p.dim() <= 1 for p in group["params"])
        assert (group["adapt"], group["weight_decay"]) == (not is_exempt, 0.01 * (not is_exempt))
    assert isinstance(build(configure(*LAMB_RUN), here.comm).optimizer, LAMB)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", [LARS_RUN, LAMB_RUN], ids=["LARS", "LAMB"])
def test_node_sharding_gives_the_same_bits_with_lars_and_lamb(here, configure, shared, how):
    plain, sharded = (
        Job(here, configure, shared / shard, *how, f"train.shard={shard}")
        for shard in ("none", "node")
    )
    for job in (plain, sharded):
        assert isinstance(job.part(), Outcome)
    assert_same_run(plain, sharded)


@pytest.mark.ranks(2)
def test_the_noise_scale_is_rejected_without_averages_in_backward(here, configure):
    without_ranks = "log.noise_scale must be false"
    for other, expected in {
        "train.shard=node": without_ranks,
        "train.reproducible=true": without_ranks,
        "sync.method=local_sgd": without_ranks,
    }.items():
        with pytest.raises(ConfigError, match=expected):
            build(configure("log.noise_scale=true", other), here.comm)


@pytest.mark.ranks(1, 2, 3)
def test_the_noise_scale_equals_that_of_the_samples_on_any_number_of_ranks(
    here, configure, shared
):
    """The rate is nearly 0, so the model is constant and its noise scale can be computed."""
    how = [*NOISE, "optimizer.lr=1e-30", "train.epochs=20", "schedule.name=constant"]
    job = Job(here, configure, shared / "run", *how)
    task = job.built()
    task.exchange.noise._decay = 1.0
    job.part(task=task)

    train = problem.samples()
    gradients = []
    for x, y in zip(torch.from_numpy(train["x"]), torch.from_numpy(train["y"]), strict=True):
        loss = functional.cross_entropy(task.model(x[None]), y[None])
        parts = torch.autograd.grad(loss, [*task.model.parameters()])
        gradients.append(torch.cat([each.flatten() for each in parts]))
    drawn = torch.stack(gradients)  # batches of an epoch are drawn without replacement
    variance = float(drawn.var(dim=0).sum())
    squared = float(drawn.mean(dim=0).square().sum()) - variance / len(drawn)
    output = [each["noise_scale"] for each in read(job.directory.metrics) if "noise_scale" in each]
    assert output[-1] == pytest.approx(variance / squared, rel=0.3)
