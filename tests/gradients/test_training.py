"""Many ranks train as one process does on the same global batches."""

import pytest
import torch

from tests.gradients.training import largest_difference, train_alone, train_together


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_one_rank_is_the_plain_loop_bit_for_bit(hvd, dtype):
    together, alone = train_together(hvd, 20, dtype), train_alone(20, dtype)
    assert all(map(torch.equal, together.parameters(), alone.parameters()))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usefixtures("overlap")
def test_ranks_train_as_one_process(hvd):
    assert largest_difference(train_together(hvd, 30), train_alone(30)) < 1e-12
    together, alone = train_together(hvd, 10, torch.float32), train_alone(10, torch.float32)
    assert largest_difference(together, alone) < 1e-5


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usefixtures("overlap")
def test_two_runs_and_all_ranks_have_the_same_bits(world, hvd):
    first, second = (train_together(hvd, 8, torch.float32) for _ in range(2))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    weights = torch.cat([p.detach().view(-1) for p in first.parameters()]).numpy().tobytes()
    assert len(set(world.allgather(weights))) == 1
