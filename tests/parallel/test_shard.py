"""Every stage of ZeRO trains as one process does, and holds as much as the paper says."""

import pytest
import torch.distributed as dist

import hpctrain
from hpctrain.parallel import hybrid_mesh, shard
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
