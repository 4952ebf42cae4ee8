"""Check ``Hogwild``: as good as serial steps on sparse problems, with counts of lost updates."""

import time

import pytest
import torch
from torch import nn

from hpctrain.core.errors import CommError, ConfigError, NotFiniteError
from tests.gradients.training import LAST, ONE_NODE
from tests.local_sgd.local_methods import num_kinds, weights_of

ROWS, FEATURES, PER_ROW = 4000, 2000, 3


def sparse_problem():
    """Return the three features of each row, their values, and targets with noise."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(FEATURES, (ROWS, PER_ROW), generator=generator)
    values = torch.randn(ROWS, PER_ROW, generator=generator, dtype=torch.float64)
    truth = torch.randn(FEATURES, generator=generator, dtype=torch.float64)
    noise = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return ids, values, (truth[ids] * values).sum(1) + 0.3 * noise


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(FEATURES, 1, dtype=torch.float64)
        self.weight = nn.Embedding.from_pretrained(table, freeze=False, sparse=True)

    def forward(self, ids, values):
        return (self.weight(ids)[..., 0] * values).sum(1)


def learn(model, optimizer, problem, order) -> None:
    ids, values, targets = problem
    for rows in order.split(4):
        optimizer.zero_grad()
        (model(ids[rows], values[rows]) - targets[rows]).square().sum().div(2).backward()
        optimizer.step()


def loss_of(model, problem) -> float:
    ids, values, targets = problem
    return (model(ids, values) - targets).square().mean().item()


def order_of(epochs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.cat([torch.randperm(ROWS, generator=generator) for _ in range(epochs)])


@ONE_NODE
@pytest.mark.ranks(2, 4)
def test_sparse_problem_converges_as_with_serial_steps(hvd, world):
    problem, order = sparse_problem(), order_of(2)
    serial = Linear()
    learn(serial, torch.optim.SGD(serial.parameters(), lr=0.1), problem, order)
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hvd.Hogwild(model, optimizer) as method:
        learn(model, optimizer, problem, order[world.rank :: world.size])
        lost = method.lost_updates()
    assert num_kinds(world, weights_of(model)) == 1
    assert loss_of(model, problem) < 1.05 * loss_of(serial, problem) < 0.5
    assert 0 <= lost.components <= FEATURES
    assert lost.updates > len(order)
    assert lost.share < 0.02


@ONE_NODE
@pytest.mark.ranks(2, 3)
def test_lost_updates_are_counted(hvd, world):
    """Rank 1 changes two elements without reporting it: exactly these are counted."""
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hvd.Hogwild(model, optimizer) as method:
        grad = torch.zeros(FEATURES, 1, dtype=torch.float64)
        grad[world.rank * 10 : world.rank * 10 + 10] = -1.0
        model.weight.weight.grad = grad.to_sparse(1)
        optimizer.step()
        assert method.lost_updates() == (0, 10 * world.size, 0.0)
        if world.rank == 1:
            model.weight.weight.data[10:12] -= 1.0  # removes two updates of rank 1
        world.barrier()
        whole = weights_of(model).clone()
        found = method.lost_updates()
        assert found.components == 2
        assert found.share == pytest.approx(2 / (10 * world.size))
        if world.rank == 0:
            model.weight.weight.data.fill_(float("nan"))
        with pytest.raises(NotFiniteError, match=r"weight.weight have nan"):
            method.lost_updates()
        if world.rank == 1:
            model.load_state_dict({"weight.weight": whole[:, None]})
        with pytest.raises(ConfigError, match=r"weight.weight changed outside of step\(\)"):
            method.lost_updates()
    assert model.weight.weight.sum().item() == 10 * world.size - 2


@ONE_NODE
@pytest.mark.ranks(1, 2, 3)
def test_rounding_of_many_steps_does_not_count_as_lost(hvd, world):
    """Ranks alternate, so that nothing is lost; each step rounds identically."""
    starts = (torch.full((5, 2), 100.0), torch.full((5, 2), 100.0), torch.tensor(100.0))
    model = nn.ParameterList([*starts, torch.ones(0, 3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for p in model:
        p.grad = torch.ones_like(p)
    model[0].grad = torch.ones(5, 2).to_sparse(1)
    with hvd.Hogwild(model, optimizer) as method:
        for turn in range(world.size):
            for _ in range(400 if turn == world.rank else 0):
                optimizer.step()
            world.barrier()
        moved = 100.0 - model[1].detach()
        assert ((moved - 4.0 * world.size).abs() > 100.0 * 8 * torch.finfo(moved.dtype).eps).all()
        assert method.lost_updates() == (0, 400 * 21 * world.size, 0.0)
        if world.rank == 0:
            model[0].data[3, 1] += 0.1
            model[2].data += 0.1
        world.barrier()
        assert method.lost_updates().components == 2


@ONE_NODE
@pytest.mark.ranks(2)
def test_steps_are_visible_to_other_ranks_inside_the_block_only(hvd, world):
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hvd.Hogwild(model, optimizer, counts=False) as method:
        if world.rank == 0:
            model.weight.weight.grad = torch.full((FEATURES, 1), -1.0, dtype=torch.float64)
            optimizer.step()
        world.barrier()
        assert weights_of(model).unique().tolist() == [1.0]
        with pytest.raises(ConfigError, match="counts"):
            method.lost_updates()
    if world.rank == 0:
        optimizer.step()
    world.barrier()
    assert weights_of(model).unique().tolist() == [2.0 - world.rank]


@ONE_NODE
@pytest.mark.ranks(2)
def test_unsupported_optimizers_are_rejected_on_all_ranks(hvd, world):
    model = Linear()
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1 * world.rank),
        torch.optim.Adam(model.parameters()),
    ):
        with pytest.raises(ConfigError):
            hvd.Hogwild(model, optimizer)
    for made in (hvd.Hogwild, hvd.AsyncSGD):
        method = made(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match="a parameter can only have one"):
            hvd.Hogwild(model, torch.optim.SGD(model.parameters(), lr=0.1))
        method.close()


@pytest.mark.ranks(2)
def test_several_nodes_are_refused(hvd_nodes):
    model = Linear()
    with pytest.raises(ConfigError, match="on one node"):
        hvd_nodes.Hogwild(model, torch.optim.SGD(model.parameters(), lr=0.1))


@ONE_NODE
@LAST
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "what", ["added", pytest.param("unfrozen", marks=pytest.mark.conformance)]
)
def test_parameter_added_later_raises_on_all_ranks(hvd, world, what):
    """On all ranks the parameter would be local to each, and not shared."""
    model, other = Linear(), nn.Linear(1, 1)
    model.bias = nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        if world.rank == 0 and what == "added":
            optimizer.add_param_group({"params": [*other.parameters()]})
        if world.rank == 0 and what == "unfrozen":
            model.bias.requires_grad_()
        start = time.monotonic()
        while time.monotonic() - start < 10:
            optimizer.step()

    with pytest.raises((ConfigError, CommError)) as caught, hvd.Hogwild(model, optimizer):
        loop()
    texts = world.allgather(str(caught.value))
    found = f"{2 if what == 'added' else 1} of {3 if what == 'added' else 2} are not"
    assert all(found in text for text in texts), texts
