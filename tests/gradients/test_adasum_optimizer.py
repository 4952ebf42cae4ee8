"""Steps combined by Adasum: equal ones count once, those at right angles are added."""

import pytest
import torch
from torch import nn

from hpctrain.core.errors import ConfigError
from tests.gradients.training import MANY, ONE_NODE, backward, distributed, make_model, wrapped

pytestmark = ONE_NODE


KINDS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


@MANY
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_equal_steps_are_taken_once(hvd, kind):
    model, alone = make_model(), make_model()
    optimizer, plain = kind(model.parameters()), kind(alone.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
    for _ in range(3):
        for m, o in ((model, optimizer), (alone, plain)):
            o.zero_grad()
            m(torch.ones(2, 64).double()).square().sum().backward()
            o.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@MANY
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_steps_at_right_angles_are_added(hvd, compression):
    model = nn.Linear(hvd.size(), 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    how = getattr(hvd.Compression, compression)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=how, op=hvd.Adasum)
    model(torch.eye(hvd.size())[hvd.rank()]).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight.detach(), torch.full((1, hvd.size()), -0.5))


@MANY
def test_all_ranks_hold_the_same_weights_after_any_steps(hvd):
    model, optimizer = wrapped(hvd, op=hvd.Adasum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        optimizer.zero_grad()
        if hvd.rank() or step:
            backward(hvd, model, step)
        optimizer.synchronize()
        optimizer.raise_flags(1 << hvd.rank() % 2)
        optimizer.step()
        scheduler.step()
        assert optimizer.raised_flags == 0b11
        for p in model.parameters():
            assert torch.equal(hvd.broadcast(p.detach(), 0), p)


@MANY
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_ranks_whose_scaler_skips_take_the_step_of_the_others(hvd, kind, looks):
    model, alone = make_model(), make_model()
    optimizer, plain = kind(model.parameters()), kind(alone.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + hvd.rank()), growth_interval=2)
    some, everyone = 2, 4  # steps in which others than rank 0, or all, find inf
    x, last = torch.ones(2, 64).double(), []
    for step in range(5):
        flawed = step == everyone or (step == some and hvd.rank() > 0)
        optimizer.zero_grad()
        loss = model(torch.full_like(x, torch.inf) if flawed else x).square().sum()
        scaler.scale(loss).backward()
        if looks:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        plain.zero_grad()
        alone(x).square().sum().backward()
        plain.step()
        now = [p.detach().clone() for p in model.parameters()]
        for one, other, before in zip(now, alone.parameters(), last or now, strict=True):
            assert torch.equal(hvd.broadcast(one, 0), one)
            if step <= some:
                torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-12)
            assert step < everyone or torch.equal(one, before)
        last = now


@MANY
def test_what_adasum_cannot_do_is_refused(hvd):
    model = make_model()
    with pytest.raises(ConfigError, match="predivide"):
        distributed(hvd, model, op=hvd.Adasum, gradient_predivide_factor=2.0)
    optimizer = distributed(hvd, model, op=hvd.Adasum)
    with pytest.raises(ConfigError, match="inside step"):
        optimizer.skip_synchronize()
    with pytest.raises(ConfigError, match="weight an average"):
        optimizer.set_num_samples(3)


@pytest.mark.ranks(1)
def test_adasum_in_a_world_of_one_is_the_plain_optimizer(hvd):
    model, alone = make_model(), make_model()
    optimizer, plain = distributed(hvd, model, op=hvd.Adasum), distributed(hvd, alone)
    for m, o in ((model, optimizer), (alone, plain)):
        backward(hvd, m)
        with o.skip_synchronize():
            o.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)
