"""DDP's buckets move to node memory at their first sum, and gradients keep the same bits."""

import gc
import resource

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as all call it

from hpctrain.core.torch_compat import can_move_storage

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.usefixtures("ours")]

WIDTH = 600  # two layers of 1.4 MiB
STEPS = 4


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def by_stage(_, bucket):
    """Average a bucket by an explicit call, which does not move its tensors."""
    values = bucket.buffer().mul_(1 / dist.get_world_size())
    work = dist.all_reduce(values, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def gradients(wrapped, steps=STEPS):
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        wrapped.zero_grad()
        wrapped(torch.randn(5, WIDTH, generator=random)).square().mean().backward()
        yield [p.grad.clone() for p in wrapped.parameters()]


def in_place():
    moved = dist.group.WORLD._in_place
    return len(moved._known) if moved else 0


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 2}])
def test_gradients_in_place_have_the_bits_of_staged_sums(options):
    ours, reference = DDP(model(), **options), DDP(model(), **options)
    reference.register_comm_hook(None, by_stage)
    pairs = zip(gradients(ours), gradients(reference), strict=True)
    for step, (found, expected) in enumerate(pairs):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        num_buckets = len(ours.reducer._get_zeros_like_grad_buckets()) if step else 1
        assert in_place() == num_buckets * can_move_storage
    del ours, reference, pairs
    gc.collect()
    dist.all_reduce(torch.ones(1))  # the group keeps a reference to its last operation
    assert in_place() == 0


def test_a_rank_that_has_joined_contributes_zeros():
    wrapped = DDP(model())
    me, size = dist.get_rank(), dist.get_world_size()
    with Join([wrapped]):
        for _ in range(3 + me):
            wrapped.zero_grad()
            wrapped(torch.ones(2, WIDTH)).sum().backward()
    alone = model()
    alone(torch.ones(2, WIDTH)).sum().backward()
    # gradients of the only rank that had the last batch
    last = [p.grad / size for p in alone.parameters()]
    if me == size - 1:
        for found, expected in zip(wrapped.parameters(), last, strict=True):
            torch.testing.assert_close(found.grad, expected)


def test_tensors_of_the_program_are_not_moved():
    seen = np.ones(WIDTH * WIDTH, np.float32)
    tensor = torch.from_numpy(seen)
    weight = torch.ones(2, requires_grad=True)

    def sum_up(_):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()

    weight.register_hook(sum_up)
    weight.sum().backward()
    assert set(seen.tolist()) == {dist.get_world_size() ** 2}


def test_without_memory_on_one_rank_all_ranks_use_staged_sums():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        wrapped, reference = DDP(model()), DDP(model())
        reference.register_comm_hook(None, by_stage)
        for found, expected in zip(gradients(wrapped, 2), gradients(reference, 2), strict=True):
            assert all(map(torch.equal, found, expected))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert in_place() == 0
