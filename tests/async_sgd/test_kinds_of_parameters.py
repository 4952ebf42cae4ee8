"""Parameters of any shape and dtype, on servers."""

import pytest
import torch
from torch import nn

from tests.gradients.training import MANY, ONE_NODE
from tests.local_sgd.local_methods import weights_of


def synchronous(hvd, model, optimizer, *, ours):
    """Hook an optimizer for synchronous steps; return the method, None for the distributed one."""
    if ours:
        return hvd.StaleSynchronous(model, optimizer, 0)
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    return None


@MANY
@ONE_NODE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bits_are_summed_in_float32_and_rounded_once(hvd, world, dtype):
    """As in the distributed optimizer; the sum of the first ones is above what float16 holds."""
    generator = torch.Generator().manual_seed(world.rank)
    grad = torch.randn(4 * world.size + 1, generator=generator).to(dtype)
    grad[:4] = 4e4
    found = []
    for ours in (True, False):
        model = nn.ParameterList([torch.zeros(len(grad), dtype=dtype)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        method = synchronous(hvd, model, optimizer, ours=ours)
        for _ in range(2):
            optimizer.zero_grad()
            (model[0] * grad).sum().backward()
            optimizer.step()
        if ours:
            method.finish()
            method.close()
        found.append(weights_of(model))
    assert found[0].isfinite().all()
    assert torch.equal(*found)


class Odd(nn.Module):
    """Parameters of odd shapes: a number, none, transposed, without a gradient, frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.number = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.across = nn.Parameter(torch.randn(3, 5).t())
        self.unused = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return (x @ self.across * self.number + self.frozen + self.empty.sum()).square().sum()


@MANY
@pytest.mark.parametrize("kind", ["SGD", "NAdam", "Adagrad"])
def test_parameters_of_any_shape_are_stepped_and_come_back(hvd, per_node, kind):
    found = []
    for ours in (True, False):
        model = Odd()
        options = {"momentum": 0.9, "weight_decay": 0.1} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        method = synchronous(hvd, model, optimizer, ours=ours)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 5), 0.1 * (hvd.rank() + step + 1))).backward()
            optimizer.step()
            if ours and step == 1:
                with method.settled():
                    saved = optimizer.state_dict()
                optimizer.load_state_dict(saved)
                method.reload()
        if ours:
            method.finish()
            method.close()
        found.append(weights_of(model))
    if per_node is None or hvd.size() < 3:
        assert torch.equal(*found)


@MANY
@pytest.mark.parametrize("make", ["StaleSynchronous", "AsyncSGD", "Downpour"])
@pytest.mark.parametrize("numel", [0, 5])
def test_an_empty_parameter_may_be_the_only_one_of_its_dtype(hvd, make, numel):
    model = nn.ParameterList([torch.ones(numel), torch.ones(0, dtype=torch.float64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with getattr(hvd, make)(model, optimizer) as method:
        for _ in range(2):
            optimizer.zero_grad()
            sum(p.double().sum() for p in model).backward()
            optimizer.step()
        with method.settled():
            assert not model[1].numel()
    assert (model[0] < 1).all()
