"""Context parallel ranks train as one process does and store only their part of activations."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from hpctrain import ConfigError
from hpctrain.parallel import build_mesh, context_attention, gradient_mesh
from tests.parallel.training import CLIP, adamw, batches, check, loss_of, transformer

pytestmark = pytest.mark.usefixtures("nodes")

HEADS = {"by heads": {"num_heads": 4}, "ring": {"width": 18, "num_heads": 3}}


def divided(model, cp):
    model.parallel_context(cp)
    return model


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("how", HEADS)
def test_ranks_train_as_one_process_does(how):
    mesh = build_mesh(cp=2)
    places = [(mesh[axis].size(), mesh[axis].get_local_rank()) for axis in ("dp", "cp")]
    replicas = gradient_mesh(mesh).get_group()
    model = divided(transformer(**HEADS[how]), mesh["cp"])
    wrapped = DistributedDataParallel(model, process_group=replicas)
    optimizer, losses = adamw(model.parameters()), []
    for whole in batches():
        optimizer.zero_grad()
        mine = whole
        for dim, (size, rank) in enumerate(places):
            mine = [part.chunk(size, dim)[rank] for part in mine]
        loss = loss_of(wrapped(mine[0]), mine[1])
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.AVG, group=replicas)
        losses.append(total.item())
    check(losses, model.named_parameters(), **HEADS[how])


def saved_bytes(call):
    """Return the bytes that autograd saves for backward, each storage once, and the result."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    return sum(kept.values()), out


@pytest.mark.ranks(4)
@pytest.mark.parametrize("heads", [4, 6])
def test_four_ranks_store_a_quarter_of_the_activations_of_attention(heads):
    cp, size = build_mesh(cp=4)["cp"], dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, 64, 8, dtype=torch.float64) for _ in range(3)]
    parts = [x.chunk(size, 2)[dist.get_rank()].clone().requires_grad_() for x in whole]
    for tensor in whole:
        tensor.requires_grad_()
    attend = partial(scaled_dot_product_attention, is_causal=True)
    all_bytes, expected = saved_bytes(lambda: attend(*whole))
    my_bytes, found = saved_bytes(lambda: context_attention(*parts, cp))
    assert my_bytes <= 0.3 * all_bytes
    expected.square().sum().backward()
    found.square().sum().backward()
    mine = lambda tensor: tensor.chunk(size, 2)[dist.get_rank()]  # noqa: E731
    torch.testing.assert_close(found, mine(expected), rtol=1e-12, atol=1e-12)
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one.grad, mine(other.grad), rtol=1e-12, atol=1e-12)
    with pytest.raises(ConfigError, match="repeat the heads of keys and values"):
        context_attention(parts[0], parts[1][:, :1], parts[2], cp)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_ring_in_16_bits_has_an_error_like_torchs(dtype):
    cp, rank = build_mesh(cp=2)["cp"], dist.get_rank()
    torch.manual_seed(0)
    whole = [torch.randn(2, 5, 32, 8).mul(3).to(dtype) for _ in range(3)]
    attend = partial(scaled_dot_product_attention, is_causal=True)

    def found(call, tensors):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = call(*leaves)
        out.square().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    mine = lambda tensor: tensor.chunk(2, 2)[rank]  # noqa: E731
    exact = found(attend, [tensor.double() for tensor in whole])
    theirs = found(attend, whole)
    ours = found(lambda *parts: context_attention(*parts, cp), map(mine, whole))
    for one, other, expected in zip(ours, theirs, exact, strict=True):
        assert one.dtype == dtype
        usual = (mine(other).double() - mine(expected)).abs().max()
        error = (one.double() - mine(expected)).abs().max()
        assert error <= 2 * usual
