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


@pytest.mark.ranks(4)
def test_a_synchronous_node_is_one_rank_with_a_larger_batch(world, hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    with hvd_nodes.HierarchicalLocalSGD(model, optimizer, 3) as method:
        train(hvd_nodes, model, optimizer, method, 0, 9)
        sent = method.facts["bytes_sent"]
    hvd_nodes.shutdown()
    hvd_nodes.init(range(2)) if world.rank < 2 else None
    weights = None
    if world.rank < 2:
        other = make_model()
        optimizer = sgd(other)
        with hvd_nodes.LocalSGD(other, optimizer, 3) as method:
            train(hvd_nodes, other, optimizer, method, 0, 9)
            assert method.facts["bytes_sent"] == sent
        weights = weights_of(other)
    weights = world.bcast(weights)
    assert float((weights - weights_of(model)).abs().max()) < 1e-12


@pytest.mark.ranks(3, 4)
def test_samples_weight_both_levels(world, hvd_nodes):
    """Each rank moves a weight by its number in every step, and counts by that number plus one."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hvd_nodes.HierarchicalLocalSGD(model, optimizer, 4, node_steps=2) as method:
        for _ in range(4):
            method.set_num_samples(world.rank + 1, nominal=2)
            optimizer.zero_grad()
            (-model.weight.sum() * world.rank).backward()
            optimizer.step()

    def mean(values: list[float], ranks: range) -> float:
        return sum(v * (r + 1) for v, r in zip(values, ranks, strict=True)) / sum(
            r + 1 for r in ranks
        )

    everyone, after = range(world.size), []
    for rank in everyone:
        node = range(rank // 2 * 2, min(rank // 2 * 2 + 2, world.size))
        after.append(mean([2 * r for r in node], node) + 2 * rank)
    assert model.weight.item() == pytest.approx(mean(after, everyone), rel=1e-12)


@pytest.mark.ranks(3, 4)
def test_samples_count_once_though_a_round_ends_early(world, hvd_nodes):
    """Each rank moves a weight by its number; the samples change after the round."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method = hvd_nodes.HierarchicalLocalSGD(model, optimizer, 8, node_steps=2)
    node = range(world.rank // 2 * 2, min(world.rank // 2 * 2 + 2, world.size))

    def steps(num_steps: int, num_samples: int) -> None:
        for _ in range(num_steps):
            method.set_num_samples(num_samples, nominal=2)
            optimizer.zero_grad()
            (-model.weight.sum() * world.rank).backward()
            optimizer.step()

    steps(1, world.rank + 1)
    method.finish()
    before = model.weight.item()
    steps(2, 9 - world.rank)
    mean = sum(2 * r * (9 - r) for r in node) / sum(9 - r for r in node)
    assert model.weight.item() - before == pytest.approx(mean, rel=1e-12)
    method.close()
