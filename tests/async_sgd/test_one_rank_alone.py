"""Check that frozen layers or invalid gradients on one rank raise an error on all ranks."""

import pytest
import torch
from torch import nn

from hpctrain.core.errors import HpctrainError, NotFiniteError
from tests.gradients.training import LAST, MANY, ONE_NODE

METHODS = {
    "StaleSynchronous": {"staleness": 1},
    "AsyncSGD": {},
    "Downpour": {"n_push": 2, "n_fetch": 2},
    "Hogwild": {},
    "LocalSGD": {"steps": 2},
    "DiLoCo": {"steps": 2},
    "PostLocalSGD": {"steps": 2, "start": 1},
    "HierarchicalLocalSGD": {"steps": 2},
    "StagedSGD": {"warmup_steps": 1, "cooldown_start": 9},
}


@MANY
@LAST
@ONE_NODE
@pytest.mark.parametrize(
    ("name", "what"),
    # On one node StagedSGD averages gradients in each step, so that all replicas are NaN.
    [(name, what) for name in METHODS for what in ("frozen", "nan", "inf")][:-2],
)
def test_a_frozen_layer_or_a_gradient_that_is_not_finite_on_one_rank(hvd, world, name, what):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    is_one = world.rank == world.size - 1

    def train(method):
        for step in range(4):
            if step == 1 and is_one and what == "frozen":
                model[0].requires_grad_(False)
            optimizer.zero_grad()
            is_wrong = step == 1 and is_one and what != "frozen"
            inputs = torch.full((1, 2), float(what) if is_wrong else 1.0, dtype=torch.float64)
            model(inputs).sum().backward()
            optimizer.step()
        if name == "Hogwild":
            method.lost_updates()  # a rank that waits for no other synchronizes here

    with (
        pytest.raises(HpctrainError) as caught,
        getattr(hvd, name)(model, optimizer, **METHODS[name]) as method,
    ):
        train(method)
    kinds = world.allgather(type(caught.value))
    assert (NotFiniteError in kinds) is (what != "frozen"), kinds
    if name in ("StaleSynchronous", "AsyncSGD", "Downpour") and what != "frozen":
        assert set(kinds) == {NotFiniteError}
        assert f"0.weight on rank {world.size - 1}" in str(caught.value)
