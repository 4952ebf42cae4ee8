"""``HierarchicalLocalSGD``: who agrees when, on two nodes."""

import pytest
import torch
from torch import nn

from tests.gradients.training import make_model, sgd
from tests.local_sgd.local_methods import train, weights_of


def kinds(world, model) -> tuple[int, int]:
    """Return how many different models there are on all ranks, and on this rank's node."""
    weights = [w.numpy().tobytes() for w in world.allgather(weights_of(model))]
    node = slice(world.rank // 2 * 2, world.rank // 2 * 2 + 2)
    return len(set(weights)), len(set(weights[node]))


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("node_steps", [1, 2])
def test_nodes_agree_often_and_all_ranks_rarely(world, hvd_nodes, node_steps):
    model = make_model()
    optimizer = sgd(model)
    with hvd_nodes.HierarchicalLocalSGD(model, optimizer, 6, node_steps=node_steps) as method:
        for step in range(1, 13):
            train(hvd_nodes, model, optimizer, method, step - 1, step)
            on_all, on_node = kinds(world, model)
            if step % 6 == 0:
                assert (on_all, on_node) == (1, 1)
            elif step % node_steps == 0:
                assert (on_all, on_node) == (2, 1)
            else:
                assert on_all == world.size


def pushed(hvd, steps: int):
    """Make a method for one weight, and what moves it by this rank's number in every step."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method = hvd.HierarchicalLocalSGD(model, optimizer, steps, node_steps=2)

    def push(num_steps: int, num_samples: int) -> float:
        for _ in range(num_steps):
            method.set_num_samples(num_samples, nominal=2)
            optimizer.zero_grad()
            (-model.weight.sum() * hvd.rank()).backward()
            optimizer.step()
        return model.weight.item()

    return method, push


def node_of(rank: int, size: int) -> range:
    return range(rank // 2 * 2, min(rank // 2 * 2 + 2, size))


def mean(values: dict[int, float], weights: dict[int, float]) -> float:
    return sum(values[r] * weights[r] for r in values) / sum(weights[r] for r in values)


@pytest.mark.ranks(3, 4)
def test_samples_weight_both_levels(world, hvd_nodes):
    method, push = pushed(hvd_nodes, 4)
    weights = {rank: rank + 1 for rank in range(world.size)}
    found = push(4, weights[world.rank])
    after = {
        rank: mean({r: 2 * r for r in node_of(rank, world.size)}, weights) + 2 * rank
        for rank in weights
    }
    assert found == pytest.approx(mean(after, weights), rel=1e-12)
    method.close()


@pytest.mark.ranks(3, 4)
def test_samples_count_once_though_a_round_ends_early(world, hvd_nodes):
    """The samples change after the round."""
    method, push = pushed(hvd_nodes, 8)
    push(1, world.rank + 1)
    method.finish()
    before = push(0, 0)
    after = push(2, 9 - world.rank)
    node = node_of(world.rank, world.size)
    expected = mean({r: 2 * r for r in node}, {r: 9 - r for r in node})
    assert after - before == pytest.approx(expected, rel=1e-12)
    method.close()
