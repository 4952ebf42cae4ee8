"""Check the state of every optimizer of torch, received bitwise from the root, without a step."""

import inspect

import pytest
import torch
from torch import nn, optim

from hpctrain.core.errors import ConfigError

SIZES = pytest.mark.ranks(1, 2, 3, 4)

KINDS = {
    name: kind
    for name, kind in sorted(vars(optim).items())
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
}
OPTIONS = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True},
}
# Optimizers with different kinds of state; without a check, all would be converted equally.
HALF = ("Adafactor", "Adagrad", "Adam", *({"Muon"} & KINDS.keys()), "RMSprop")
CASES = [(kind, torch.float32) for kind in KINDS] + [(kind, torch.bfloat16) for kind in HALF]


class Model(nn.Module):
    """Define parameters of every shape that the optimizer supports."""

    def __init__(self, kind, dtype):
        super().__init__()
        self.sparse = kind == "SparseAdam"
        self.layer = nn.Embedding(4, 2, sparse=True) if self.sparse else nn.Linear(3, 2)
        self.to(dtype)
        # Muon accepts only matrices.
        self.trained = [p for p in self.parameters() if kind != "Muon" or p.dim() == 2]

    def loss(self):
        given = torch.tensor([1, 3]) if self.sparse else torch.ones(1, 3)
        output = self.layer(given if self.sparse else given.to(self.layer.weight.dtype))
        return output.float().square().sum()


def step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model.loss()
        loss.backward()
        return loss

    optimizer.step(closure)


def flat(value, path=""):
    """Return all values of nested containers by path."""
    if isinstance(value, dict):
        return {k: v for key in value for k, v in flat(value[key], f"{path}.{key}").items()}
    if isinstance(value, list | tuple):
        pairs = enumerate(value)
        return {k: v for i, item in pairs for k, v in flat(item, f"{path}.{i}").items()}
    return {path: value}


def test_list_contains_the_optimizers_of_torch():
    assert {"Adafactor", "LBFGS", "NAdam", "SparseAdam"} < KINDS.keys()
    assert len(KINDS) >= 15


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_state_and_options_are_those_of_the_root(hvd, kind, dtype):
    root = hvd.size() - 1
    torch.manual_seed(hvd.rank())
    model = Model(kind, dtype)
    lr = 0.125 if hvd.rank() == root else 0.5
    optimizer = KINDS[kind](model.trained, lr=lr, **OPTIONS.get(kind, {}))
    if hvd.rank() == root:  # only the root has state, as after loading a checkpoint
        step(model, optimizer)
        step(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    hvd.broadcast_optimizer_state(optimizer, root)
    assert not steps
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.param_groups[0]["lr"] == 0.125
    mine = flat(optimizer.state_dict())
    for name, value in hvd.broadcast_object(mine, root).items():
        assert type(mine[name]) is type(value), name
        if isinstance(value, torch.Tensor):
            assert (mine[name].dtype, mine[name].shape) == (value.dtype, value.shape), name
            assert torch.equal(mine[name], value), name
        else:
            assert mine[name] == value, name
    assert any(isinstance(value, torch.Tensor) for value in mine.values()) or kind == "SGD"
    step(model, optimizer)  # the received state is usable


@SIZES
def test_a_new_optimizer_gets_zero_gradients_as_horovods(hvd):
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    trained = nn.Parameter(torch.ones(2))
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = optim.SGD([frozen, trained, table.weight], lr=0.1, weight_decay=0.1)
    hvd.broadcast_optimizer_state(optimizer, model=table)
    assert frozen.grad is None
    assert torch.equal(trained.grad, torch.zeros(2))
    assert table.weight.grad.is_sparse
    assert torch.equal(trained, torch.ones(2))


@SIZES
def test_existing_state_is_replaced_completely(hvd):
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.Adam([p], lr=0.1)
    if hvd.rank():
        p.sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer)
    assert not optimizer.state_dict()["state"]


@SIZES
def test_distributed_optimizer_is_broadcast_too(hvd):
    model = nn.Linear(2, 2)
    inner = optim.SGD(model.parameters(), lr=0.1 + hvd.rank(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.ranks(2, 3, 4)
def test_only_the_ranks_of_the_set_change(hvd):
    one = hvd.add_process_set(range(1, hvd.size()))
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5 + hvd.rank())
    if one.included():
        hvd.broadcast_optimizer_state(optimizer, root_rank=1, process_set=one)
    assert optimizer.param_groups[0]["lr"] == 0.5 + min(hvd.rank(), 1)


@SIZES
def test_other_objects_are_rejected(hvd):
    with pytest.raises(ConfigError, match="got a Linear"):
        hvd.broadcast_optimizer_state(nn.Linear(1, 1))
