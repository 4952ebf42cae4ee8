"""When ``backward()`` returns, every gradient is the average over all ranks."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tests.gradients.training import (
    EVERY_SIZE,
    MANY,
    OVERLAPS,
    assert_close,
    backward,
    distributed,
    expected_gradients,
    global_batch,
    gradients,
    make_model,
    part_of,
)


@EVERY_SIZE
@OVERLAPS
def test_gradients_are_averaged_when_backward_returns(hvd):
    for by_model, set_to_none, passes in ((0, 1, 1), (0, 0, 2), (1, 1, 2), (1, 0, 1)):
        model = make_model()
        optimizer = distributed(hvd, model, backward_passes_per_step=passes)
        for step in range(3):
            (model if by_model else optimizer).zero_grad(set_to_none=bool(set_to_none))
            batches = range(passes * step, passes * (step + 1))
            for batch in batches:
                backward(hvd, model, batch)
            each = zip(*map(expected_gradients, batches), strict=True)
            assert_close(gradients(model), [sum(parts) for parts in each])


@MANY
@OVERLAPS
@pytest.mark.parametrize("whole", [True, False])
def test_shared_layers_under_reentrant_checkpointing(hvd, whole):
    def make():
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(64, 64).double(), nn.Linear(64, 10).double()])

    def forward(model, images, *, reentrant):
        hidden, last = model
        if not reentrant:
            return last(hidden(hidden(images)))
        twice = checkpoint(
            hidden, checkpoint(hidden, images, use_reentrant=True), use_reentrant=True
        )
        return checkpoint(last, twice, use_reentrant=True) if whole else last(twice)

    model, alone = make(), make()
    optimizer = distributed(hvd, model)
    images, labels = global_batch(0)
    cross_entropy(forward(alone, images, reentrant=False), labels).backward()
    images, labels = part_of((images, labels), hvd.rank(), hvd.size())
    for step in range(3):
        optimizer.zero_grad()
        loss = cross_entropy(forward(model, images.requires_grad_(), reentrant=True), labels)
        loss.backward()
        if whole and step == 0:
            optimizer.synchronize()  # the end of the first such backward shows only in step()
        assert_close(gradients(model), gradients(alone))


@MANY
def test_dtypes_may_be_mixed(hvd):
    model = nn.Sequential(nn.Linear(64, 32).double(), nn.Linear(32, 10).float())
    optimizer = distributed(hvd, model)
    optimizer.zero_grad()
    images, labels = part_of(global_batch(0), hvd.rank(), hvd.size())
    cross_entropy(model[1](model[0](images).float()), labels).backward()
    for p in model.parameters():
        assert p.grad.dtype == p.dtype
        torch.testing.assert_close(hvd.allreduce(p.grad), p.grad)


@MANY
def test_averages_in_float16_do_not_overflow_where_the_average_does_not(hvd):
    model = nn.Linear(1, 1, bias=False).half()
    kept = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.full((1, 1), 40000.0, dtype=torch.float16)).sum().backward()
    assert model.weight.grad.item() == 40000
    assert kept
