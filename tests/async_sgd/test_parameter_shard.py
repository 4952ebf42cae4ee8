"""Check shards of parameters: their layout, their steps, and writes outside of steps."""

import copy

import pytest
import torch
from torch import nn

from hpctrain.async_sgd.parameter_layout import ParameterLayout, WriteWatch
from hpctrain.async_sgd.parameter_shard import ParameterShard
from hpctrain.async_sgd.server_messages import Push

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.AdamW(ps, 0.01),
}


def made(optimizer, num_servers):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(9, 31), nn.Linear(31, 5), nn.Linear(5, 2).double())
    model.scale = nn.Parameter(torch.tensor(0.5))
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    return model, optimizer, ParameterLayout(optimizer, names, num_servers)


def push_of(layout, shard, gradients, settings, weight):
    flats = [torch.empty_like(block.packed.flat, device="cpu") for block in layout.blocks]
    layout.fill(flats, gradients)
    has = bytes(grad is not None for grad in gradients)
    return Push(0, 0, weight, has, settings, True, False, parts=shard.parts(flats))


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5])
def test_each_element_is_on_one_server(num_servers):
    _, _, layout = made("sgd", num_servers)
    counts = [torch.zeros(p.numel()) for p in layout.parameters]
    for server in range(num_servers):
        for own in layout.ranges(server):
            counts[own.number][own.inside] += 1
    assert all(bool((count == 1).all()) for count in counts)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_servers", [1, 3])
@torch.no_grad()
def test_shards_step_with_the_weighted_mean_of_gradients(name, num_servers):
    model, optimizer, layout = made(name, num_servers)
    shards = [ParameterShard(layout, server, optimizer) for server in range(num_servers)]
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for shard in shards:
        shard.load(optimizer)
    expected = copy.deepcopy(model)
    plain = OPTIMIZERS[name](expected.parameters())
    for step in range(3):
        both = [[torch.randn_like(p) for p in layout.parameters] for _ in range(2)]
        both[0][step] = None  # counts as zeros
        for p, one, other in zip(expected.parameters(), *both, strict=True):
            p.grad = ((0 if one is None else one) + 3 * other) / 4
        plain.step()
        for shard in shards:
            pushes = zip(both, (1.0, 3.0), strict=True)
            shard.step([push_of(layout, shard, g, settings, w) for g, w in pushes], settings)
    flats = [torch.empty_like(block.packed.flat, device="cpu") for block in layout.blocks]
    for shard in shards:
        shard.copy_to(shard.parts(flats))
    layout.take(flats)
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


@torch.no_grad()
def test_steps_on_a_copy_change_neither_values_nor_state():
    _, optimizer, layout = made("adam", 1)
    shard = ParameterShard(layout, 0, optimizer)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    shard.load(optimizer)
    push = push_of(layout, shard, [torch.ones_like(p) for p in layout.parameters], settings, 1.0)
    shard.step([push], settings)
    values, ahead = layout.new_parts(0), layout.new_parts(0)
    shard.copy_to(values)
    shard.copy_to(ahead)
    state = copy.deepcopy(shard.state())
    with shard.on_copy(ahead):
        shard.step([push], settings)
    assert not any(torch.equal(*pair) for pair in zip(values, ahead, strict=True))
    now = layout.new_parts(0)
    shard.copy_to(now)
    assert all(torch.equal(*pair) for pair in zip(values, now, strict=True))
    for (_, before), (_, after) in zip(state, shard.state(), strict=True):
        assert {k: v.tolist() for k, v in before.items()} == {
            k: v.tolist() for k, v in after.items()
        }


def test_writes_outside_of_steps_are_found():
    model, _, layout = made("sgd", 1)
    watch = WriteWatch(layout)
    watch.note()
    assert watch.written() == []
    with torch.no_grad():
        model[0].bias.zero_()
        model[1].weight.data = model[1].weight.data.clone()
    assert watch.written() == ["0.bias", "1.weight"]
    watch.note()
    assert watch.written() == []
