"""Inconsistent inputs or changes of a pipeline are an error on all ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from hpctrain import ConfigError, MismatchError
from hpctrain.parallel import Pipeline, build_mesh
from hpctrain.parallel.split import Chain
from hpctrain.parallel.stage import SCHEDULES

pytestmark = [pytest.mark.usefixtures("nodes"), pytest.mark.ranks(2)]


def linear(depth=4):
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth))).double()


def made(model, **options):
    chosen = {"loss": mse_loss, "num_microbatches": 4, **options}
    return Pipeline(copy.deepcopy(model), build_mesh(pp=2)["pp"], ["*"], **chosen)


def batch(*shape):
    random = torch.Generator().manual_seed(2)
    return [torch.randn(8, *shape, generator=random, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_may_return_views_and_every_schedule_evaluates(schedule):
    # nn.Linear returns a view for three-dimensional input
    model, (given, target) = linear(), batch(3, 4)
    loss = mse_loss(model(given), target)
    loss.backward()
    for parts in {4} if schedule != "zbv" else (1, 2, 4):
        pipeline = made(model, schedule=schedule, num_microbatches=parts)
        pipeline.step(given, target)
        torch.testing.assert_close(pipeline.evaluate(given, target), loss.detach())
        for name, parameter in pipeline.model.named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


def test_different_batches_or_arguments_are_an_error():
    rank, (given, target) = dist.get_rank(), batch(4)
    pipeline = made(linear())
    for call in (pipeline.step, pipeline.evaluate):
        with pytest.raises(
            MismatchError, match=r"entry 1, counted from 0, differs: rank 0: target .* of dp only"
        ):
            call(given, target + rank)
        with pytest.raises(ConfigError, match="got 8 samples and 4 targets"):
            call(given, target[:4])
    for depth, options in (
        (4, {"schedule": ("1f1b", "gpipe")[rank]}),
        (4, {"num_microbatches": 2 + rank}),
        (4 + rank, {}),
    ):
        with pytest.raises(MismatchError, match="a pipeline must be the same on every rank"):
            made(linear(depth), **options)


def test_unsupported_schedules_and_layers_are_an_error():
    with pytest.raises(ConfigError, match="2 ranks must have at least 2 micro-batches, got 1"):
        made(linear(), num_microbatches=1)
    for schedule in ("interleaved", "zero_bubble"):
        with pytest.raises(ConfigError, match="divide into 2 equal rounds, got 5; use 4"):
            made(linear(), schedule=schedule, num_microbatches=5)
    chain = Chain([("0", nn.LSTM(4, 4))])
    with pytest.raises(ConfigError, match="must return one tensor, but 0 returned tuple"):
        chain(torch.zeros(2, 4))


TRAINED = (  # the trained parameters of four layers, before each step
    *("0 1 2 3", "2.bias 3", "3", "0.weight 1.bias 2 3", "0", "2.weight", "1", "0 3", "0 1 2 3"),
)


@pytest.mark.parametrize("first", [0, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_may_be_frozen_and_unfrozen_and_batch_sizes_may_change(schedule, first):
    model, (given, target) = linear(), batch(3, 4)
    pipeline = made(model, schedule=schedule, num_microbatches=2)
    for number, trained in enumerate(TRAINED[first:]):
        size = (8, 4)[number % 2]
        for one in (model, pipeline.model):
            one.zero_grad()
            for name, parameter in one.named_parameters():
                trains = any(name.startswith(each) for each in trained.split())
                parameter.requires_grad_(trains)
        loss = mse_loss(model(given[:size]), target[:size])
        loss.backward()
        if number == 3:
            torch.testing.assert_close(
                pipeline.evaluate(given, target).item(), mse_loss(model(given), target).item()
            )
        found = pipeline.step(given[:size], target[:size])
        assert found.item() == pytest.approx(loss.item(), rel=1e-12)
        for name, parameter in pipeline.model.named_parameters():
            expected = model.get_parameter(name).grad
            assert (parameter.grad is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(parameter.grad, expected)


def test_a_shared_weight_must_be_frozen_in_all_stages():
    model, (given, target) = linear(), batch(4)
    model[3].weight = model[0].weight
    pipeline = made(model)
    mine = pipeline.model.get_parameter(("0.weight", "3.weight")[dist.get_rank()])
    optimizer = torch.optim.AdamW(pipeline.model.parameters(), weight_decay=0.5)
    mine.requires_grad_(requires_grad=False)
    before = mine.clone()
    pipeline.step(given, target)
    optimizer.step()
    assert torch.equal(mine, before)
    mine.requires_grad_(requires_grad=dist.get_rank() == 1)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"got 0.weight frozen, 3.weight trained; set"):
            pipeline.step(given, target)
    mine.requires_grad_(requires_grad=True)
    pipeline.step(given, target)
    assert mine.grad.abs().max() > 0


def test_layers_with_a_frozen_first_layer_can_be_timed():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    model[0].requires_grad_(requires_grad=False)
    tokens = torch.arange(8)
    pipeline = made(model, loss=cross_entropy, sample=tokens[:2])
    expected = cross_entropy(model(tokens), tokens).item()
    assert pipeline.step(tokens, tokens).item() == pytest.approx(expected)


@pytest.mark.parametrize("timed", [False, True])
def test_only_training_changes_buffers_and_draws_random_numbers(timed):
    torch.manual_seed(3)
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)
    model, (given, target) = nn.Sequential(*layers, nn.BatchNorm1d(4)).double(), batch(4)
    before = torch.get_rng_state()
    pipeline = made(model, sample=given[:2] if timed else None)
    assert torch.equal(torch.get_rng_state(), before)
    pipeline.step(given, target)
    alone = copy.deepcopy(model[:2])
    for part in given.chunk(4):
        alone(part)
    for name, found in pipeline.model.named_buffers():
        if "num" in name:
            assert found == 4
        elif name.startswith("1."):
            torch.testing.assert_close(found, alone.get_buffer(name))
