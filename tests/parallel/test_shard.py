"""Every stage of ZeRO trains as one process does, and holds as much as the paper says."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import hpctrain
from hpctrain.parallel import hybrid_mesh, shard
import hpctrain.parallel.offload as offload
from tests.parallel.training import CLIP, adamw, batches, check, loss_of, transformer

pytestmark = pytest.mark.usefixtures("nodes")


def mine(tensor, rank=None):
    """This rank's rows: as many on each rank, or uneven ones."""
    return tensor.tensor_split(dist.get_world_size())[dist.get_rank() if rank is None else rank]


def local_loss(model, given, following):
    """The loss of this rank's rows, weighted so that the mean over ranks is that of all rows."""
    rows, share = mine(given), mine(following)
    weight = share.numel() * dist.get_world_size() / following.numel()
    return loss_of(model(rows), share) * weight


def trained(model, optimizer, **shape):
    """Train, and compare with one process."""
    losses = []
    for given, following in batches():
        optimizer.zero_grad()
        loss = local_loss(model, given, following)
        loss.backward()
        assert optimizer.clip_grad_norm_(CLIP) > CLIP
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
    check(losses, model.named_parameters(), **shape)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_train_as_one_process_does(stage):
    shape = {"tied": stage == 2}
    model = transformer(**shape)
    trained(model, shard(model, adamw(model.parameters()), stage=stage), **shape)


@pytest.mark.ranks(2, 4)
def test_replicas_of_shards_train_as_one_process_does():
    mesh = hybrid_mesh()
    node = {tuple(group) for group in hpctrain.current().topology.nodes}
    assert tuple(mesh["shard"].mesh.tolist()) in node
    model = transformer()
    optimizer = shard(model, adamw(model.parameters()), stage=3, mesh=mesh)
    trained(model, optimizer)


class Branches(nn.Module):
    """Layers of uneven sizes, of which a pass takes those that it is told to."""

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
    """Branch 0 is used by all, 1 by one rank, 2 in later steps, 3 never; ``own`` by one rank."""
    return [True, rank == step % 2, step > 1, False, rank == 0]


def data_of(step, rank, size):
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2 + rank, 5, generator=random, dtype=torch.float64), 1 / size


def train_branches(model, optimizer, ranks, size, num_passes=1):
    """Train as so many ranks do, or as one of them."""
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
        if step == 2:  # a layer thaws
            model.last.bias.requires_grad_(True)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_passes", [1, 3])
def test_layers_unused_by_some_ranks_or_all_frozen_or_used_again_step_as_in_one_process(
    stage, num_passes
):
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, model = Branches(), Branches()
    train_branches(alone, adamw(alone.parameters()), range(size), size, num_passes)
    optimizer = shard(model, adamw(model.parameters()), stage=stage, layers=["stack.*"])
    train_branches(model, optimizer, [rank], size, num_passes)
    for name, found in model.named_parameters():
        expected = alone.get_parameter(name).detach()
        torch.testing.assert_close(found.full_tensor().detach(), expected, rtol=1e-12, atol=1e-12)
    assert not optimizer.state[model.branches[3].weight]


@pytest.mark.ranks(2, 3)
def test_state_in_a_file_has_the_bits_of_state_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "BUCKET_ELEMENTS", 64)
    found = []
    for folder in (None, str(tmp_path)):
        model = transformer()
        optimizer = shard(model, adamw(model.parameters()), stage=3, offload=folder)
        trained(model, optimizer)
        state = [p.detach() for p in model.parameters()]
        state += [v for p in model.parameters() for v in optimizer.state[p].values()]
        found.append([v.full_tensor() if isinstance(v, DTensor) else v for v in state])
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
