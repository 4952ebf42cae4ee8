"""Check that changes of local gradients with ``shard="node"`` keep replicas equal."""

import math

import pytest
import torch
from torch import nn

from hpctrain.core.errors import MismatchError
from tests.gradients.test_sharded_step import MANY, assert_same_bits, backward, batch, wrapped

pytestmark = pytest.mark.requires("own-engine")


@MANY
def test_kept_gradients_keep_their_sample_count_or_all_ranks_raise(hvd):
    model, optimizer = wrapped(hvd, shard="node")
    for step, first in enumerate((1, 1, 2)):  # samples of rank 0
        optimizer.set_num_samples(first + hvd.rank())
        backward(hvd, model, step)
        if step < 2:
            optimizer.step()
    with pytest.raises(MismatchError, match="with another sample count"):
        optimizer.step()


@MANY
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("clips", ["", "norm", "value"])
def test_synchronize_replaces_a_skipped_backward(hvd, scales, clips):
    """Call it instead of backward, once or twice, on one rank, all but one, or all ranks."""

    def train(shard):
        model, optimizer = wrapped(hvd, shard=shard)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales)
        scaler.scale(torch.ones(()))  # creates the scale on a rank without samples
        for step in range(5):
            lone = step % hvd.size()
            has_samples = (hvd.rank() != lone) if step < 3 else (hvd.rank() == lone)
            optimizer.zero_grad()
            optimizer.set_num_samples(int(has_samples))
            if has_samples:
                loss = model(batch(hvd, step, torch.float64)).square().mean()
                scaler.scale(loss).backward()
            if not has_samples or step == 4:
                optimizer.synchronize()
            if not has_samples and step == 2:
                optimizer.synchronize()
            if clips:
                scaler.unscale_(optimizer)
            if clips == "norm":
                optimizer.clip_grad_norm_(0.01)
            elif clips == "value":
                optimizer.clip_grad_value_(0.001)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return model

    ordinary, sharded = train(None), train("node")
    for one, other in zip(ordinary.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


@MANY
def test_nan_gradient_of_no_samples_adds_nothing(hvd):
    """The mean over no samples is NaN, and so is zero times that mean."""
    models = []
    for shard in (None, "node"):
        model, optimizer = wrapped(hvd, shard=shard)
        for step in range(3):
            optimizer.zero_grad()
            is_empty = hvd.rank() == step % hvd.size()
            optimizer.set_num_samples(0 if is_empty else 2)
            loss = model(batch(hvd, step, torch.float64)).square().mean()
            (loss * (math.nan if is_empty else 1.0)).backward()
            assert not is_empty or shard is None or model[0].weight.grad.isnan().all()
            if step == 2:
                assert optimizer.clip_grad_norm_(0.01).isfinite()
            optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


@MANY
def test_clipping_by_a_norm_of_nan_makes_all_changed_parameters_nan(hvd):
    for shard in (None, "node"):
        model, optimizer = wrapped(hvd, shard=shard)
        loss = model(batch(hvd, 0, torch.float64)).square().mean()
        if hvd.rank() == hvd.size() - 1:  # in the slice of one rank
            loss = loss + model[0].bias[0] * math.nan
        loss.backward()
        assert optimizer.clip_grad_norm_(0.01).isnan()
        optimizer.step()
        assert all(p.isnan().all() for p in model.parameters() if p is not model.unused)


def assert_shards_have_the_same_bits(hvd, train):
    """Check that ``train(model, optimizer)`` has the same result with and without ``shard``."""
    models = []
    for shard in (None, "node"):
        model, optimizer = wrapped(hvd, shard=shard)
        train(model, optimizer)
        models.append(model)
    assert_same_bits(*models)


@MANY
@pytest.mark.parametrize("loads", [False, True])
def test_clipping_is_discarded_with_the_gradients_of_the_model(hvd, loads):
    def train(model, optimizer):
        backward(hvd, model, 0)
        optimizer.clip_grad_norm_(1e-3)
        if loads:
            optimizer.load_state_dict(optimizer.state_dict())
        model.zero_grad()
        backward(hvd, model, 1)
        optimizer.step()

    assert_shards_have_the_same_bits(hvd, train)


@MANY
def test_backward_that_adds_to_clipped_gradients_raises_on_all_ranks(hvd):
    model, optimizer = wrapped(hvd, shard="node")
    backward(hvd, model, 0)
    optimizer.clip_grad_norm_(1e-3)
    backward(hvd, model, 1)
    with pytest.raises(MismatchError, match="grad is local until step"):
        optimizer.step()


@MANY
def test_gradients_set_manually_after_a_clipped_step_are_averaged(hvd):
    def train(model, optimizer):
        backward(hvd, model, 0)
        optimizer.clip_grad_value_(1e-3)
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + hvd.rank())
        optimizer.step()

    assert_shards_have_the_same_bits(hvd, train)


@MANY
def test_change_between_two_backwards_is_discarded_with_the_gradients(hvd):
    model, optimizer = wrapped(hvd, shard="node")
    backward(hvd, model, 0)
    model[0].weight.grad.mul_(2.0)
    backward(hvd, model, 1)
    optimizer.zero_grad()
    backward(hvd, model, 2)
    optimizer.step()
    known, plain = wrapped(hvd)
    backward(hvd, known, 2)
    plain.step()
    assert_same_bits(known, model)


@MANY
def test_clipped_and_moved_gradients_raise_on_all_ranks(hvd):
    model, optimizer = wrapped(hvd, shard="node")
    backward(hvd, model, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model.share_memory()
    with pytest.raises(MismatchError, match="grad is local until step"):
        optimizer.step()


@MANY
def test_gradient_in_the_memory_of_another_is_named_on_all_ranks(hvd):
    model, optimizer = wrapped(hvd, shard="node")
    backward(hvd, model, 0)
    optimizer.step()
    earlier = model[0].bias.grad
    optimizer.zero_grad()
    if hvd.rank() == hvd.size() - 1:
        model[0].weight.grad = earlier[:1].expand_as(model[0].weight)
    with pytest.raises(MismatchError, match=r"grad is local until step.*0\.weight\.grad changed"):
        optimizer.step()


@MANY
def test_gradients_kept_after_a_clipped_step_raise_on_all_ranks(hvd):
    model, optimizer = wrapped(hvd, shard="node")
    backward(hvd, model, 0)
    optimizer.clip_grad_norm_(1e-3)
    optimizer.step()
    with pytest.raises(MismatchError, match="after a step that was clipped"):
        optimizer.step()


@MANY
@pytest.mark.parametrize("clears", [None, False, True])
def test_parameters_with_a_new_layout_before_backward_keep_their_bits(hvd, clears):
    def train(**options):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(3, 5).t())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), **options)
        for step in range(3):
            weight.data = weight.data.contiguous() if step != 1 else weight.data.t().clone().t()
            if clears is not None:
                optimizer.zero_grad(clears)
            (weight * (hvd.rank() + step)).sum().backward()
            optimizer.step()
        return weight

    assert_same_bits(train(), train(shard="node"))


def train_scaled(hvd, kind, settings, unscales, clears, **options):
    """Train with a scaler, whose loss overflows on one rank, then on another."""
    model, optimizer = wrapped(hvd, kind, torch.float32, settings, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2)
    scales = []
    for step in range(7):
        clears(model, optimizer)
        overflows = step in {1, 4} and hvd.rank() == step % 2
        loss = model(batch(hvd, step)).square().mean()
        if overflows:  # in the slice of one rank
            loss = loss + (model[0].bias * float("inf")).sum()
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_value_(0.01)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model, optimizer.state_dict(), scales


@MANY
@pytest.mark.parametrize("per_node", [2], indirect=True)
@pytest.mark.parametrize("unscales", [False, True])
def test_scaler_unscales_averages_and_skips_a_step_on_all_ranks(hvd, unscales):
    for kind, settings, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}, {}),
        (torch.optim.AdamW, {"lr": 0.01, "fused": True}, {}),
        (torch.optim.Adam, {"lr": 0.01, "foreach": True}, {"op": hvd.Sum}),
    ):
        for clears in (lambda _, o: o.zero_grad(), lambda m, _: m.zero_grad()):
            ordinary, sharded = (
                train_scaled(hvd, kind, settings, unscales, clears, shard=shard, **options)
                for shard in (None, "node")
            )
            for one, other in zip(ordinary, sharded, strict=True):
                assert_same_bits(one, other)
        assert {500.0, 1000.0} <= set(sharded[2])


@MANY
def test_norm_after_unscale_is_the_norm_of_the_unscaled_average(hvd):
    models = []
    for shard in (None, "node"):
        model, optimizer = wrapped(hvd, shard=shard)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(batch(hvd, step, torch.float64)).square().mean()).backward()
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(0.02)
            scaler.step(optimizer)
            scaler.update()
        models.append(model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@MANY
@pytest.mark.parametrize("shard", [None, "node"])
def test_a_scaler_rejects_a_step_without_gradients(hvd, shard):
    model, optimizer = wrapped(hvd, shard=shard)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(hvd, 0, torch.float64)).square().mean()).backward()
    model.zero_grad()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


@MANY
def test_averages_of_16_bits_are_not_unscaled_as_with_torch(hvd):
    model, optimizer = wrapped(hvd, dtype=torch.float16, shard="node")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(batch(hvd, 0, torch.float16)).square().mean()).backward()
    with pytest.raises(ValueError, match="FP16 gradients"):
        scaler.unscale_(optimizer)
