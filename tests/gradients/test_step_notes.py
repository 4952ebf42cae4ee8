"""The loss of all samples rides in the message that opens a step, the same on every rank."""

import math

import pytest
import torch

from hpctrain.runtime.world import current
from tests.gradients.training import EVERY_SIZE, ONE_NODE, distributed, make_model

pytestmark = ONE_NODE


@EVERY_SIZE
@pytest.mark.parametrize("shard", [None, "node"])
def test_the_mean_loss_is_that_of_all_samples(hvd, shard):
    model = make_model()
    optimizer = distributed(hvd, model, **({"shard": shard} if shard else {}))
    rank, size = hvd.rank(), hvd.size()
    for step in range(4):
        optimizer.zero_grad()
        counts = [2 * (other + step) % (2 * size) or 2 * (size == 1) for other in range(size)]
        num = counts[rank]  # one rank has no samples, of several
        optimizer.set_num_samples(num, nominal=1)
        if step > 1:
            optimizer.tell_loss(10.0 * rank + step if num else math.nan)
        if num:
            model(torch.ones(2, 64).double()).square().sum().backward()
        optimizer.synchronize()
        if step > 1:
            total = sum(n * (10.0 * other + step) for other, n in enumerate(counts))
            assert optimizer.mean_loss == pytest.approx(total / sum(counts))
            assert len({*current().comm.allgather_object(optimizer.mean_loss)}) == 1
        with optimizer.skip_synchronize():
            optimizer.step()
