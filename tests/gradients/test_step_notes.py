"""Check the additional values of a step: correct, and the same on every rank."""

import math
import random

import pytest
import torch
from torch import nn

from hpctrain.runtime.world import current
from tests.gradients.training import EVERY_SIZE, ONE_NODE, OVERLAPS, distributed, make_model


@ONE_NODE
@EVERY_SIZE
@pytest.mark.parametrize("shard", [None, "node"])
def test_the_mean_loss_is_that_of_all_samples(hvd, shard):
    model = make_model()
    optimizer = distributed(hvd, model, **({"shard": shard} if shard else {}))
    rank, size = hvd.rank(), hvd.size()
    for step in range(4):
        optimizer.zero_grad()
        counts = [2 * (other + step) % (2 * size) or 2 * (size == 1) for other in range(size)]
        num = counts[rank]  # one of several ranks has no samples
        optimizer.set_num_samples(num, nominal=1)
        if step > 1:
            optimizer.report_loss(10.0 * rank + step if num else math.nan)
        if num:
            model(torch.ones(2, 64).double()).square().sum().backward()
        optimizer.synchronize()
        if step > 1:
            total = sum(n * (10.0 * other + step) for other, n in enumerate(counts))
            assert optimizer.mean_loss == pytest.approx(total / sum(counts))
            assert len({*current().comm.allgather_object(optimizer.mean_loss)}) == 1
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.requires("own-engine")
@EVERY_SIZE
@OVERLAPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_values_that_are_not_finite_are_detected_on_all_ranks_during_the_sum(hvd, dtype):
    model = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (1, 700, 9001, 0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    optimizer.look_at_sums()
    draw, most = random.Random(3), torch.finfo(dtype).max
    for step in range(12):
        value = draw.choice([math.nan, math.inf, -math.inf, most, most, 1.0])
        whose, which = draw.randrange(hvd.size()), draw.randrange(3)
        place = draw.choice([0, -1, draw.randrange(model[which].numel())])
        given = [torch.ones_like(p) for p in model]
        if whose == hvd.rank():
            given[which][place] = value
        if value == most and which == 1:  # finite, although the sum of its elements is not
            given[1].fill_(most / hvd.size())
        optimizer.zero_grad()
        torch.autograd.backward([*model], given)
        expected = all(bool(p.grad.isfinite().all()) for p in model)
        known = expected if hvd.size() > 1 else None
        message = current().comm.allgather_object(optimizer.sums_are_finite)
        assert message == [known] * hvd.size(), (step, value)
        optimizer.step()
        assert optimizer.sums_are_finite is None


@pytest.mark.requires("own-engine")
@ONE_NODE
@pytest.mark.ranks(2, 3)
def test_flags_and_the_check_of_sums_remain_in_a_rebuilt_world(hvd):
    model = make_model()
    optimizer, here = distributed(hvd, model), current()
    optimizer.look_at_sums()
    optimizer.raise_flags(1 << hvd.rank() % 2)
    optimizer._exchange.rebind(here.comm, here.plan)
    model(torch.ones(2, 64).double()).sum().backward()
    assert (optimizer.sums_are_finite, optimizer.raised_flags) == (True, 0b11)


@ONE_NODE
@pytest.mark.ranks(2, 3)
def test_finiteness_of_sums_that_cannot_be_inspected_is_unknown(hvd):
    for options in ({"compression": hvd.Compression.bf16}, {"op": hvd.Adasum}, {}):
        model = make_model(torch.float32)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), **options)
        if options:
            optimizer.look_at_sums()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert optimizer.sums_are_finite is None
