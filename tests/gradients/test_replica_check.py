"""Check that ``check_replicas`` reports differences on every rank."""

import pytest
import torch
from torch import nn

from hpctrain.core.errors import ReplicaError
from hpctrain.runtime.world import current
from tests.gradients.training import ONE_NODE, sgd

pytestmark = [ONE_NODE, pytest.mark.ranks(2, 3)]


@pytest.fixture
def trained(hvd):
    """Take two steps of a model with buffers, each rank from its own samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    torch.manual_seed(hvd.rank())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_check_of_equal_replicas_sends_only_a_small_message(hvd, trained):
    model, optimizer = trained
    assert not all(
        torch.equal(model[1].running_mean, other)
        for other in hvd.allgather(model[1].running_mean[None])
    )
    before = sum(current().comm.traffic()[:2])
    hvd.check_replicas(model, optimizer)
    assert sum(current().comm.traffic()[:2]) - before < 1000


@torch.no_grad()
@pytest.mark.parametrize("what", ["parameter", "state", "group", "buffer", "missing", "sign"])
def test_differences_are_reported_with_their_ranks_on_every_rank(hvd, trained, what):
    model, optimizer = trained
    last = hvd.size() - 1
    others = "rank 0" if last == 1 else "ranks 0-1"
    weight, bias = model[2].weight[1, 2], model[2].bias
    bias.zero_()
    change, output = {
        "parameter": (
            lambda: weight.copy_(torch.nextafter(weight, torch.tensor(9.0))),
            rf"1 of \d+ values differ: parameter 2\.weight \({others}: \w+; rank {last}",
        ),
        "state": (
            lambda: optimizer.state[model[0].bias]["momentum_buffer"][1].add_(1),
            r"momentum_buffer of 0\.bias",
        ),
        "group": (lambda: optimizer.param_groups[0].update(lr=2.0), "lr of optimizer group 0"),
        "buffer": (
            lambda: model[1].num_batches_tracked.add_(1),
            r"buffer 1\.num_batches_tracked",
        ),
        "missing": (optimizer.state.clear, rf"rank {last}: not there"),
        "sign": (lambda: bias[0].copy_(torch.tensor(-0.0)), r"parameter 2\.bias"),
    }[what]
    if hvd.rank() == last:
        change()
    buffers = {"buffers": True} if what == "buffer" else {}
    with pytest.raises(ReplicaError, match=output):
        hvd.check_replicas(model, optimizer, **buffers)
    hvd.check_replicas(model[0])


def test_buffers_that_all_ranks_calculate_together_are_compared(hvd):
    model = nn.Sequential(hvd.SyncBatchNorm(3))
    model(torch.randn(4, 3))
    hvd.check_replicas(model)
    model[0].running_var += hvd.rank()
    with pytest.raises(ReplicaError, match=r"buffer 0\.running_var"):
        hvd.check_replicas(model)
    hvd.check_replicas(model, buffers=False)


def test_ranks_outside_a_process_set_are_not_compared(hvd):
    few = hvd.add_process_set([0])
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(hvd.rank())
    hvd.check_replicas(model, process_set=few)
    with pytest.raises(ReplicaError):
        hvd.check_replicas(model)


def flip_a_bit(values, place=5):
    values.view(-1).view(torch.int32)[place] ^= 1 << 30


@torch.no_grad()
def test_heal_copies_the_majority_bitwise(hvd, trained, caplog):
    model, optimizer = trained
    weight, momentum = model[2].weight, optimizer.state[model[0].weight]["momentum_buffer"]
    expected = [value.clone() for value in (weight, momentum)]
    if hvd.rank() == hvd.size() - 1:
        flip_a_bit(weight)
        flip_a_bit(momentum)
    if hvd.size() == 2:  # with two ranks there is no majority, so nothing is changed
        with pytest.raises(ReplicaError, match=r"is not the same tensor on more than half"):
            hvd.check_replicas(model, optimizer, heal=True)
        assert torch.equal(weight, expected[0]) == (hvd.rank() == 0)
        return
    hvd.check_replicas(model, optimizer, heal=True)
    assert all(map(torch.equal, (weight, momentum), expected))
    assert ("2 of " in caplog.text and "rank 2: " in caplog.text) == (hvd.rank() == 0)
    hvd.check_replicas(model, optimizer)


@torch.no_grad()
@pytest.mark.ranks(3, 4)
def test_each_rank_may_have_another_value_to_heal(hvd):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(hvd.size())))
    hvd.broadcast_parameters(model.state_dict())
    expected = [value.clone() for value in model.parameters()]
    flip_a_bit(model[hvd.rank()].weight, place=hvd.rank() % 4)
    hvd.check_replicas(model, heal=True)
    assert all(map(torch.equal, model.parameters(), expected))


@torch.no_grad()
def test_messages_do_not_grow_with_the_number_of_different_replicas(hvd, monkeypatch):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    for parameter in model.parameters():
        parameter.add_(hvd.rank())
    comm, gathered = current().comm, []
    gather = comm.allgather_object
    monkeypatch.setattr(
        comm, "allgather_object", lambda value: gathered.append(value) or gather(value)
    )
    with pytest.raises(ReplicaError, match=r"100 of 100 values differ: parameter 0\.weight"):
        hvd.check_replicas(model)
    assert len(str(gathered)) < 300


@torch.no_grad()
def test_differences_outside_tensors_are_not_healed(hvd, trained):
    model, optimizer = trained
    before = model[2].weight.clone()
    if hvd.rank() == hvd.size() - 1:
        optimizer.param_groups[0].update(lr=2.0)
        flip_a_bit(model[2].weight)
    with pytest.raises(ReplicaError, match=r"values to heal must be dense tensors|more than half"):
        hvd.check_replicas(model, optimizer, heal=True)
    assert torch.equal(model[2].weight, before) == (hvd.rank() != hvd.size() - 1)
