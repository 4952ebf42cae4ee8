"""Optimizers, schedulers, scalers and closures go on to work, on averages."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.gradients.training import (
    EVERY_SIZE,
    MANY,
    assert_close,
    backward,
    distributed,
    expected_gradients,
    global_batch,
    gradients,
    largest_difference,
    make_model,
    part_of,
    sgd,
)


@MANY
def test_a_rank_may_skip_backward(hvd):
    model = make_model()
    optimizer = distributed(hvd, model)
    before = [p.detach().clone() for p in model.parameters()]
    if hvd.rank() == 0:
        images, labels = global_batch(0)
        cross_entropy(model(images), labels).backward()
    optimizer.step()
    for p, old, g in zip(model.parameters(), before, expected_gradients(), strict=True):
        torch.testing.assert_close(p.detach(), old - 0.01 * g / hvd.size(), rtol=1e-11, atol=1e-14)


@MANY
def test_a_scaler_skips_the_step_on_all_ranks_together(hvd):
    model = make_model(torch.float32)
    optimizer = distributed(hvd, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    for overflow in (True, False):
        optimizer.zero_grad()
        images, labels = part_of(global_batch(0, torch.float32), hvd.rank(), hvd.size())
        loss = cross_entropy(model(images), labels)
        scaler.scale(loss * float("inf") if overflow and hvd.rank() == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        same = all(map(torch.equal, before, (p.detach() for p in model.parameters())))
        assert same is overflow
    assert scaler.get_scale() == 2.0


@MANY
@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.001, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.001, foreach=True),
    ],
    ids=["sgd foreach", "sgd fused", "adamw fused", "adam foreach"],
)
def test_foreach_and_fused_optimizers_step_on_averages(hvd, kind):
    model, alone = make_model(), make_model()
    optimizer, plain = hvd.DistributedOptimizer(kind(model.parameters())), kind(alone.parameters())
    for step in range(5):
        for m, o, batch in (
            (model, optimizer, part_of(global_batch(step), hvd.rank(), hvd.size())),
            (alone, plain, global_batch(step)),
        ):
            o.zero_grad()
            cross_entropy(m(batch[0]), batch[1]).backward()
            o.step()
    assert largest_difference(model, alone) < 1e-9


@EVERY_SIZE
def test_schedulers_made_before_and_after_go_on_to_work(hvd):
    model = make_model()
    plain = sgd(model)
    before = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    backward(hvd, model)
    optimizer.step()
    before.step()
    after.step()
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5 * 0.1)
    assert_close(gradients(model), expected_gradients())
