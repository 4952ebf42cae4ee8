"""Every stage of ZeRO trains as one process does."""

import re
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import hpctrain
from hpctrain import ConfigError, MismatchError, TopologyError
from hpctrain.parallel import build_mesh, hybrid_mesh, offload, shard
from tests.parallel.training import CLIP, adamw, batches, check, loss_of, transformer

pytestmark = pytest.mark.usefixtures("nodes")


def mine(tensor, rank=None):
    """Return this rank's rows, in equal or unequal parts."""
    return tensor.tensor_split(dist.get_world_size())[dist.get_rank() if rank is None else rank]


def local_loss(model, given, following):
    """Return this rank's loss, weighted so that the mean over ranks is the loss of all rows."""
    rows, share = mine(given), mine(following)
    weight = share.numel() * dist.get_world_size() / following.numel()
    return loss_of(model(rows), share) * weight


def step(model, optimizer, given, following):
    optimizer.zero_grad()
    loss = local_loss(model, given, following)
    loss.backward()
    assert optimizer.clip_grad_norm_(CLIP) > CLIP
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return total.item()


def trained(model, optimizer, **shape):
    """Train; compare losses and parameters with one process."""
    losses = [step(model, optimizer, *batch) for batch in batches()]
    check(losses, model.named_parameters(), **shape)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_to_different_norms_raises_on_all_ranks(stage):
    model = transformer()
    optimizer = shard(model, adamw(model.parameters()), stage=stage)
    given, following = batches()[0]
    local_loss(model, given, following).backward()
    optimizer.clip_grad_norm_(1.0 + (dist.get_rank() == 1))
    with pytest.raises(MismatchError, match=r"differ in clipping .*rank 1: max_norm 2.0"):
        optimizer.step()
    optimizer.zero_grad()
    local_loss(model, given, following).backward()
    optimizer.step()  # without clipping


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_train_as_one_process_does(stage):
    shape = {"tied": stage == 2}
    model = transformer(**shape)
    trained(model, shard(model, adamw(model.parameters()), stage=stage), **shape)


@pytest.mark.ranks(4)
def test_hybrid_sharding_trains_as_one_process_does():
    mesh = hybrid_mesh()
    node = {tuple(group) for group in hpctrain.current().topology.nodes}
    assert tuple(mesh["shard"].mesh.tolist()) in node
    model = transformer()
    optimizer = shard(model, adamw(model.parameters()), stage=3, mesh=mesh)
    trained(model, optimizer)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_layer_is_gathered_while_the_previous_one_computes(stage):
    torch.manual_seed(5)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model, seen = nn.Sequential(*layers), []
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)

    def at_work(number, to_come, _):
        group = layers[to_come]._get_fsdp_state()._fsdp_param_group
        end = time.monotonic() + 20
        while not group._all_gather_result.all_gather_work.is_completed():
            assert time.monotonic() < end, "an all-gather must complete while a layer computes"
            time.sleep(0.001)
        seen.append((number, to_come))

    for number in range(3):
        layers[number].register_forward_pre_hook(lambda _, x, n=number: at_work(n, n + 1, x))
    # the gathers of layers 2 and 1 overlap with the backward of the layer after each
    behind = [2, 1] if stage == 3 else []
    for number in behind:
        hook = layers[number].register_full_backward_pre_hook
        hook(lambda _, grad, n=number: at_work(n + 1, n, grad))
    model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    optimizer.step()
    assert seen == [(0, 1), (1, 2), (2, 3), *((n + 1, n) for n in behind)]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_layer_skipped_in_one_pass_has_new_values_in_the_next(stage):
    torch.manual_seed(5)
    model = Choice(nn.Linear(3, 3), nn.Linear(3, 3))
    second = [p.detach().clone() for p in model[1].parameters()]
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    x = torch.ones(1, 3)
    with torch.no_grad():
        model(x, 0)
        for parameter in model[1].parameters():
            parameter.mul_(2)
        expected = nn.functional.linear(x, *(2 * p for p in second))
        torch.testing.assert_close(model(x, 1), expected)
    assert optimizer.param_groups


class Choice(nn.Sequential):
    """Two layers, of which a forward pass uses one."""

    def forward(self, x, number):
        return self[number](x)


class Branches(nn.Module):
    """Layers of unequal sizes; an argument of forward selects the layers in use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 7)
        self.branches = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.stack = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.own = nn.Parameter(torch.randn(3))
        self.last = nn.Linear(7, 1)
        self.last.bias.requires_grad_(False)
        self.double()

    def forward(self, x, uses):
        x = self.first(x)
        for number, branch in enumerate(self.branches):
            out = torch.tanh(branch(x))
            x = x + out if uses[number] else x + 0 * out.detach()
        for layer in self.stack:
            x = x + torch.tanh(layer(x))
        return self.last(x) + (self.own.sum() if uses[-1] else 0)


def uses_of(step, rank):
    """Return, for each branch, True if a rank uses it: all, one rank, later, never, rank 0."""
    return [True, rank == step % 2, step > 1, False, rank == 0]


def data_of(step, rank, size):
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2 + rank, 5, generator=random, dtype=torch.float64), 1 / size


def train_branches(model, optimizer, ranks, size, num_passes=1):
    """Train the parts of ``ranks`` in this process."""
    for step in range(4):
        optimizer.zero_grad()
        for turn in range(num_passes):
            is_last = turn == num_passes - 1
            hold = is_last or not hasattr(optimizer, "no_sync")
            with nullcontext() if hold else optimizer.no_sync():
                for rank in ranks:
                    rows, weight = data_of(10 * step + turn, rank, size)
                    weight = 1 if len(ranks) == 1 and size > 1 else weight
                    (model(rows, uses_of(step, rank)).square().mean() * weight).backward()
        clip = getattr(optimizer, "clip_grad_norm_", None)
        if clip:
            clip(0.5)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step == 2:  # unfreeze a layer
            model.last.bias.requires_grad_(True)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("stage", "num_passes"), [(1, 1), (1, 3), (2, 3), (3, 1)])
def test_layers_with_partial_use_or_frozen_or_shared_step_as_in_one_process(stage, num_passes):
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, model = Branches(), Branches()
    train_branches(alone, adamw(alone.parameters()), range(size), size, num_passes)
    optimizer = shard(model, adamw(model.parameters()), stage=stage, layers=["stack.*"])
    train_branches(model, optimizer, [rank], size, num_passes)
    for name, found in model.named_parameters():
        expected = alone.get_parameter(name).detach()
        torch.testing.assert_close(found.full_tensor().detach(), expected, rtol=1e-12, atol=1e-12)
    assert not optimizer.state[model.branches[3].weight]


@pytest.mark.ranks(3)
def test_offloaded_state_has_the_same_bits_as_state_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "BUCKET_ELEMENTS", 64)
    found = []
    for folder in (None, str(tmp_path)):
        model = transformer()
        optimizer = shard(model, adamw(model.parameters()), stage=3, offload=folder)
        for given, following in batches(2):
            step(model, optimizer, given, following)
        state = [p.detach() for p in model.parameters()]
        state += [v for p in model.parameters() for v in optimizer.state[p].values()]
        found.append([v.full_tensor() if isinstance(v, DTensor) else v for v in state])
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.mark.ranks(2)
def test_a_checkpoint_of_one_layout_resumes_in_another(tmp_path_factory, world):
    folder = world.bcast(str(tmp_path_factory.mktemp("state")))
    (*first, last), losses = batches(3), []
    for layout in ({"stage": 3}, {"stage": 1, "mesh": hybrid_mesh()}, None):
        model = transformer()
        optimizer = adamw(model.parameters())
        if layout:
            optimizer = shard(model, optimizer, **layout)
        if not losses:
            for batch in first:
                step(model, optimizer, *batch)
        weights, state = get_state_dict(model, optimizer, options=FLAT)
        found = {"model": weights, "optimizer": state}
        (dcp.load if losses else dcp.save)(found, checkpoint_id=folder)
        output = {"model_state_dict": weights, "optim_state_dict": state}
        set_state_dict(model, optimizer, **output, options=FLAT)
        if layout:
            losses.append(step(model, optimizer, *last))
        else:
            losses.append(loss_of(model(last[0]), last[1]).item())
        assert {int(one["step"]) for one in optimizer.state.values()} == {2 + bool(layout)}
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_existing_optimizer_state_is_sharded_and_parameters_come_from_rank_0(stage):
    expected, model = transformer(), transformer()
    alone, optimizer = adamw(expected.parameters()), adamw(model.parameters())
    first, *others = batches(3)
    for one, its in ((expected, alone), (model, optimizer)):
        loss_of(one(first[0]), first[1]).backward()
        its.step()
    if dist.get_rank():
        with torch.no_grad():
            model.head.weight.add_(1)
    stepped = shard(model, optimizer, stage=stage)
    assert stepped is optimizer
    assert isinstance(stepped, torch.optim.AdamW)
    for given, following in others:
        step(model, stepped, given, following)
        alone.zero_grad()
        loss_of(expected(given), following).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), CLIP)
        alone.step()
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor().detach()
        torch.testing.assert_close(whole, expected.get_parameter(name), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 3])
def test_clip_grad_value_clips_shards_as_in_one_process(stage):
    expected, model = transformer(), transformer()
    shard(model, adamw(model.parameters()), stage=stage)
    (batch,) = batches(1)
    loss_of(expected(batch[0]), batch[1]).backward()
    local_loss(model, *batch).backward()
    most = max(p.grad.abs().max().item() for p in expected.parameters()) / 2
    for one in (expected, model):
        nn.utils.clip_grad_value_(one.parameters(), most)
    for name, parameter in model.named_parameters():
        found, right = parameter.grad.full_tensor(), expected.get_parameter(name).grad
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("clears", ["optimizer", "model"])
def test_cleared_gradients_do_not_affect_the_next_step(clears):
    first, second = batches(2)
    found = []
    for has_cleared in (False, True):
        model = transformer()
        optimizer = shard(model, adamw(model.parameters()), stage=1)
        if has_cleared:
            with optimizer.no_sync():
                local_loss(model, *first).backward()
            with pytest.raises(ConfigError, match="call the last backward before step"):
                optimizer.step()
            with optimizer.no_sync():
                local_loss(model, *first).backward()
            (model if clears == "model" else optimizer).zero_grad()
            optimizer.step()  # a step without gradients
            assert not optimizer.state
        optimizer.zero_grad()
        local_loss(model, *second).backward()
        optimizer.step()
        found.append([p.full_tensor() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, rows, num_layers):
        for layer in self.layers[:num_layers]:
            rows = layer(rows)
        return rows


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_layer_that_was_used_only_before_gradients_were_cleared_is_not_updated(stage):
    model = Parts()
    optimizer = shard(model, adamw(model.parameters()), stage=stage)
    before = model.layers[1].weight.full_tensor().clone()
    model(torch.ones(2, 4), 2).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(2, 4), 1).sum().backward()
    optimizer.step()
    assert torch.equal(model.layers[1].weight.full_tensor(), before)


@pytest.mark.ranks(2)
def test_an_evaluation_between_backward_and_step_does_not_keep_old_weights():
    (batch,) = batches(1)
    found = []
    for evaluates in (False, True):
        model = transformer()
        optimizer = shard(model, adamw(model.parameters()), stage=2)
        local_loss(model, *batch).backward()
        if evaluates:
            with torch.no_grad():
                model(batch[0])
        optimizer.step()
        found.append(loss_of(model(batch[0]), batch[1]).item())
    assert found[0] == found[1]


REFUSED = {
    "the stage of shard() must be 1, 2 or 3, got 0": {"stage": 0},
    "the model has no module block.*; did you mean": {"layers": ["block.*"]},
    "must be elementwise, got Adafactor": {
        "make": lambda m: torch.optim.Adafactor(m.parameters())
    },
    "got 1 others; create the optimizer with model.parameters()": {
        "make": lambda _: adamw([nn.Parameter(torch.zeros(2))])
    },
    "must have one or two axes, got 4 axes": {"mesh": build_mesh},
    "No such file or directory; use another folder": {"offload": "/not/there"},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("output", REFUSED)
def test_invalid_arguments_of_shard_are_an_error_on_all_ranks(output):
    options = {"stage": 3, "make": lambda model: adamw(model.parameters()), **REFUSED[output]}
    if "mesh" in options:
        options["mesh"] = options["mesh"]()
    model, make = transformer(), options.pop("make")
    with pytest.raises(ConfigError, match=re.escape(output)):
        shard(model, make(model), **options)
    local_loss(model, *batches(1)[0]).backward()  # the model is unchanged


@pytest.mark.ranks(2)
def test_differences_between_ranks_are_an_error_on_all():
    model = transformer(depth=1 + dist.get_rank())
    with pytest.raises(MismatchError, match="the model and arguments of shard"):
        shard(model, adamw(model.parameters()), stage=3)
    model = transformer()
    optimizer = shard(model, adamw(model.parameters()), stage=1)
    with optimizer.no_sync():
        local_loss(model, *batches(1)[0]).backward()
    with pytest.raises(ConfigError, match="call the last backward before step"):
        optimizer.step()
    optimizer.zero_grad()
    local_loss(model, *batches(1)[0]).backward()
    optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
    with pytest.raises(MismatchError, match=r"rank 1: .*1.1.*set the same values on all"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_tied_layers_are_in_the_same_shard_group():
    def made():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Embedding(256, 6), nn.Linear(6, 6), nn.Linear(6, 256, bias=False))
        model[2].weight = model[0].weight
        return model.double()

    (batch,) = batches(1)
    alone, model = made(), made()
    loss_of(alone(batch[0]), batch[1]).backward()
    adam = adamw(alone.parameters())
    adam.step()
    optimizer = shard(model, adamw(model.parameters()), stage=3)
    local_loss(model, *batch).backward()
    optimizer.step()
    assert model[2].weight is model[0].weight
    whole = model[2].weight.full_tensor().detach()
    torch.testing.assert_close(whole, alone[2].weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(3)
def test_nodes_of_unequal_sizes_cannot_form_a_hybrid_mesh():
    if hpctrain.current().topology.num_nodes == 1:
        assert hybrid_mesh()["shard"].size() == 3
    else:
        with pytest.raises(TopologyError, match="got 2, 1; shard over"):
            hybrid_mesh()
