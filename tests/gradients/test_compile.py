"""Steps inside of torch.compile: gradients are averaged as they are outside of it."""

from functools import partial

import pytest
import torch
from torch import nn

from tests.gradients.training import ONE_NODE, largest_difference

pytestmark = ONE_NODE


@pytest.mark.ranks(2)
@pytest.mark.limit(180)
@pytest.mark.parametrize("local", [False, pytest.param(True, marks=pytest.mark.conformance)])
def test_a_compiled_step_is_the_plain_one(hvd, local):
    torch.compiler.reset()
    models = [nn.Linear(4, 3).double() for _ in range(2)]
    hvd.broadcast_parameters(models[0].state_dict())
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    wrap = partial(hvd.LocalSGD, steps=2) if local else lambda _, o: hvd.DistributedOptimizer(o)
    wrapped = [wrap(*pair) for pair in zip(models, optimizers, strict=True)]
    x = torch.full((2, 4), 1.0 + hvd.rank()).double()

    def train(index):
        optimizers[index].zero_grad()
        loss = models[index](x).square().mean()
        loss.backward()
        optimizers[index].step()
        return loss.detach() if local else hvd.allreduce(loss.detach(), name=f"loss {index}")

    compiled = torch.compile(train, backend="eager")
    for _ in range(4):
        assert torch.equal(compiled(0), train(1))
    assert largest_difference(*models) == 0
    assert not local or [method.facts["rounds"] for method in wrapped] == [2, 2]
