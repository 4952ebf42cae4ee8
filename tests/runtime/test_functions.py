"""The functions with Horovod's names."""

import pytest
import torch
from torch import nn

from hpctrain.errors import CommError, ConfigError

SIZES = pytest.mark.ranks(1, 2, 3, 4)


@SIZES
def test_allreduce_averages_or_sums_and_leaves_its_argument(hvd):
    ranks = range(hvd.size())
    tensor = torch.full((3, 2), float(hvd.rank()))
    assert bool((hvd.allreduce(tensor) == sum(ranks) / hvd.size()).all())
    assert bool((hvd.allreduce(tensor, op=hvd.Sum) == sum(ranks)).all())
    assert bool((tensor == hvd.rank()).all())
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert bool((tensor == sum(ranks)).all())


@SIZES
def test_averages_of_integers_are_rounded_towards_zero(hvd):
    value = hvd.allreduce(torch.tensor(-7 - hvd.rank()))
    assert value.item() == -((7 * hvd.size() + sum(range(hvd.size()))) // hvd.size())


@SIZES
def test_an_unknown_op_is_refused(hvd):
    with pytest.raises(ConfigError, match="Average or Sum, got 'max'"):
        hvd.allreduce(torch.zeros(1), op="max")


@SIZES
def test_broadcast_parameters_takes_state_dicts_and_named_parameters(hvd):
    root = hvd.size() - 1
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for params in (model.state_dict(), model.named_parameters()):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(hvd.rank())
        model[1].num_batches_tracked.fill_(hvd.rank())
        is_state = isinstance(params, dict)
        hvd.broadcast_parameters(params, root_rank=root)
        assert all(bool((p == root).all()) for p in model.parameters())
        assert model[1].num_batches_tracked.item() == (root if is_state else hvd.rank())


@SIZES
def test_broadcast_parameters_refuses_what_is_no_tensor(hvd):
    with pytest.raises(ConfigError, match="epoch is a int; send it by broadcast_object"):
        hvd.broadcast_parameters({"epoch": 3})


@pytest.mark.ranks(2, 3, 4)
def test_broadcast_parameters_refuses_other_shapes_on_every_rank(hvd):
    shape = (2, 3) if hvd.rank() == 0 else (3, 2)
    with pytest.raises(CommError, match=r"weight \(2, 3\)"):
        hvd.broadcast_parameters({"weight": torch.zeros(shape)})


KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "lbfgs": torch.optim.LBFGS,
}


@SIZES
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_optimizer_state_comes_from_the_root_without_a_step(hvd, kind):
    torch.manual_seed(hvd.rank())
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters())
    if hvd.rank() == 0:  # only the root has state, as after loading a checkpoint

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(1, 3)).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        optimizer.param_groups[0]["lr"] = 0.25
    before = [p.detach().clone() for p in model.parameters()]
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    hvd.broadcast_optimizer_state(optimizer)
    assert not steps
    assert all(map(torch.equal, before, (p.detach() for p in model.parameters())))
    assert optimizer.param_groups[0]["lr"] == 0.25
    mine = torch.cat(
        [torch.as_tensor(v).double().view(-1) for v in tensors(optimizer.state_dict())]
    )
    theirs = hvd.broadcast_(mine.clone(), root_rank=0)
    assert torch.equal(mine, theirs)
    assert len(mine) > 0


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in value:
            yield from tensors(value[key])
    elif isinstance(value, list):
        for item in value:
            yield from tensors(item)


@SIZES
def test_objects_of_the_root_reach_every_rank(hvd):
    assert hvd.broadcast_object({"seed": hvd.rank()}, root_rank=hvd.size() - 1) == {
        "seed": hvd.size() - 1
    }
