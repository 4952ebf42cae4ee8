"""``StaleSynchronous``: equal to synchronous SGD without staleness, bounded with it."""

import random
import time

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.core.errors import CommError, ConfigError, MismatchError
from tests.gradients.training import (
    EVERY_SIZE,
    MANY,
    global_batch,
    largest_difference,
    make_model,
    part_of,
    sgd,
    train_alone,
    train_together,
)
from tests.local_sgd.local_methods import weights_of

OPTIMIZERS = {
    "momentum": sgd,
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "groups": lambda model: torch.optim.RMSprop(
        [
            {"params": list(model[0].parameters()), "lr": 0.002},
            {"params": list(model[2].parameters())},
            {"params": list(model[4].parameters()), "weight_decay": 0.1},
        ],
        lr=0.001,
    ),
}


def train(hvd, model, optimizer, first, last, *, pause=lambda step: None):
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        pause(step)
        images, labels = part_of(global_batch(step, dtype), hvd.rank(), hvd.size())
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


@EVERY_SIZE
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_without_staleness_it_is_the_distributed_optimizer_to_the_bit(hvd, per_node, name, dtype):
    ours, theirs = make_model(dtype), make_model(dtype)
    optimizer = OPTIMIZERS[name](ours)
    with hvd.StaleSynchronous(ours, optimizer, 0) as method:
        train(hvd, ours, optimizer, 0, 12)
    reference = hvd.DistributedOptimizer(OPTIMIZERS[name](theirs), theirs.named_parameters())
    train(hvd, theirs, reference, 0, 12)
    gap = largest_difference(ours, theirs)
    one_order = per_node is None or hvd.size() < 3  # between nodes the sum has another order
    assert gap == 0 if one_order else gap < (1e-12 if dtype is torch.float64 else 1e-4)
    assert method.staleness_histogram in ({0: 12}, {})
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        for key, value in optimizer.state[one].items():
            same = torch.equal(torch.as_tensor(value), torch.as_tensor(reference.state[other][key]))
            assert same or not one_order, key
