"""Optimizer state that only some ranks have, where replicas average it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.gradients.training import global_batch, make_model, part_of, sgd
from tests.local_sgd.local_methods import adam, replica_of, train, weights_of

MANY = pytest.mark.ranks(2, 3)


def same(world, numbers: torch.Tensor) -> bool:
    return len(set(world.allgather(numbers.numpy().tobytes()))) == 1


@MANY
@pytest.mark.parametrize("make", [sgd, adam])
def test_a_rank_without_steps_takes_over_the_mean_of_the_others(world, hvd_nodes, make):
    model = make_model()
    optimizer = make(model)
    method = hvd_nodes.LocalSGD(model, optimizer, 2, state="average")
    states = []
    for step in range(2):
        if world.rank == 0:
            method.skip_step()
            continue
        images, labels = part_of(global_batch(step), world.rank, world.size)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        if step == 1:  # what the last step leaves is averaged at once
            other = make(copy := make_model())
            copy.load_state_dict(model.state_dict())
            other.load_state_dict(optimizer.state_dict())
            for one, two in zip(copy.parameters(), model.parameters(), strict=True):
                one.grad = two.grad.clone()
            other.step()
            states = [other.state[p] for p in copy.parameters()]
        optimizer.step()
    of_ranks = [found for found in world.allgather(states) if found]
    for parameter, *found in zip(model.parameters(), *of_ranks, strict=True):
        for key, value in optimizer.state[parameter].items():
            mean = sum(own[key] for own in found) / len(found)
            torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-15)
    assert same(world, replica_of(model, optimizer))
    method.close()


@MANY
@pytest.mark.parametrize("make", [sgd, adam])
def test_ranks_do_not_part_in_the_cool_down(world, hvd_nodes, make):
    """A layer that one rank never uses, a step that it skips: neither in state nor in counters."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.rare = make_model(), nn.Linear(64, 10).double()

        def forward(self, x):
            y = self.common(x)
            return y if world.rank == 0 and method.rounds.step < 8 else y + self.rare(x)

    torch.manual_seed(0)
    model = Branch()
    optimizer = make(model)
    options = {"warmup_steps": 0, "cooldown_start": 8, "steps": 4, "delay": 1}
    with hvd_nodes.StagedSGD(model, optimizer, **options) as method:
        for step in range(14):
            if step == 6 and world.rank == 0:
                method.skip_step()
            else:
                train(hvd_nodes, model, optimizer, method, step, step + 1)
            if step >= 7:
                assert same(world, weights_of(model)), step
        assert same(world, replica_of(model, optimizer))
