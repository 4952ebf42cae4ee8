"""Check ranks with fewer batches: ``join`` takes part in the remaining steps of other ranks."""

import time

import pytest
import torch
from torch import nn

from hpctrain.core.errors import MismatchError
from hpctrain.negotiation.negotiator import Negotiator
from tests.gradients.training import LAST, MANY, OVERLAPS


def batches_of(rank: int, unit: float = 1.0) -> list[torch.Tensor]:
    """Return two batches on rank 0, three on rank 1, and so on."""
    return [torch.full((1, 3), unit * (1 + rank + 10 * i)).double() for i in range(2 + rank)]


def trained(hvd, **options):
    """Make a model, identical on every rank, and its optimizer."""
    model = nn.Linear(3, 2).double()
    hvd.broadcast_parameters(model.state_dict())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(plain, **options)


@MANY
@OVERLAPS
@pytest.mark.parametrize("how", ["Average", "Sum", "counted"])
def test_ranks_that_have_joined_add_zeros_to_the_steps_of_the_others(hvd, how):
    model, optimizer = trained(hvd, op=hvd.Sum if how == "Sum" else hvd.Average)
    for step, x in enumerate(batches_of(hvd.rank())):
        optimizer.zero_grad()
        if how == "counted":  # ranks that have joined then have no samples
            optimizer.set_num_samples(1)
        model(x).sum().backward()
        there = [r for r in range(hvd.size()) if step < len(batches_of(r))]
        total = sum(batches_of(r)[step] for r in there).expand(2, 3)
        divisor = {"Average": hvd.size(), "Sum": 1, "counted": len(there)}[how]
        torch.testing.assert_close(model.weight.grad, total / divisor)
        metric = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="metric")
        assert metric.item() == len(there)
        optimizer.step()
    assert hvd.join() == hvd.size() - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    optimizer.zero_grad()
    model(torch.ones(1, 3).double()).sum().backward()
    optimizer.step()


@MANY
def test_join_works_with_several_optimizers(hvd):
    pairs = [trained(hvd), trained(hvd)]
    for step, x in enumerate(batches_of(hvd.rank())):
        for index in (0, 1) if step % 2 else (1, 0, 1):
            model, optimizer = pairs[index]
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert hvd.join() == hvd.size() - 1


@MANY
def test_join_returns_the_rank_of_the_last_step_despite_late_messages(hvd, monkeypatch):
    model, optimizer = trained(hvd)
    for _ in range(2 if hvd.rank() == 0 else 1):
        optimizer.zero_grad()
        model(torch.ones(1, 3).double()).sum().backward()
        optimizer.step()
    if hvd.rank() > 0:
        outbox, end = Negotiator.outbox, time.monotonic() + 1.0

        def late(self, **how):
            return [] if time.monotonic() < end else outbox(self, **how)

        monkeypatch.setattr(Negotiator, "outbox", late)
    assert hvd.join() == 0


@MANY
def test_join_counts_the_steps_since_the_last_join(hvd):
    model, optimizer = trained(hvd)
    for num_steps, whose in ((4, 0), (2, hvd.size() - 1)):
        for _ in range(num_steps if hvd.rank() == whose else 1):
            optimizer.zero_grad()
            model(torch.ones(1, 3).double()).sum().backward()
            optimizer.step()
        assert hvd.join() == whose
        hvd.broadcast_parameters(model.state_dict(), root_rank=whose)


@MANY
@LAST
def test_adasum_steps_are_rejected_after_a_rank_has_joined(hvd):
    model, optimizer = trained(hvd, op=hvd.Adasum)
    model(torch.ones(1, 3).double()).sum().backward()
    with pytest.raises(MismatchError, match="has joined"):
        hvd.join() if hvd.rank() == 0 else optimizer.step()
