"""Means through buckets, and vectors that a node holds together."""

import pytest
import torch

from hpctrain.compress.codec import Identity
from hpctrain.compress.half import HalfCodec
from hpctrain.core.errors import MismatchError
from hpctrain.local_sgd.averaged_tensors import Tensors
from hpctrain.local_sgd.averaging import AnchoredAveraging, Averaging, NodeVector
from hpctrain.runtime.world import current

EVERY_SIZE = pytest.mark.ranks(1, 2, 3, 4)


def tensors(rank: int) -> list[tuple[str, torch.Tensor]]:
    """Return tensors of several dtypes and layouts, other numbers on every rank."""
    numbers = torch.Generator().manual_seed(rank)
    images = torch.randn(2, 3, 4, 5, generator=numbers)
    return [
        ("matrix", torch.randn(70, 30, generator=numbers, dtype=torch.float64)),
        ("columns", torch.randn(30, 7, generator=numbers).t()),
        ("scalar", torch.randn((), generator=numbers)),
        ("empty", torch.empty(0)),
        ("images", images.to(memory_format=torch.channels_last)),
    ]


def node_comm():
    here = current()
    groups = [here.comm.group(ranks) for ranks in here.topology.nodes]
    return groups[here.topology.node]


@EVERY_SIZE
@pytest.mark.usefixtures("hvd_nodes")
@pytest.mark.parametrize("bucket_bytes", [1, 4096, 1 << 25])
@pytest.mark.parametrize("anchored", [False, True])
def test_every_tensor_becomes_the_weighted_mean(world, bucket_bytes, anchored):
    mine = tensors(world.rank)
    weights = [0.0 if rank == 1 else rank + 0.5 for rank in range(world.size)]
    expected = [
        sum(w * tensors(r)[i][1].double() for r, w in enumerate(weights)) / sum(weights)
        for i in range(len(mine))
    ]
    options = (current().comm, Identity(), Tensors(lambda: mine), bucket_bytes)
    averaging = AnchoredAveraging(*options, node=node_comm()) if anchored else Averaging(*options)
    assert not averaging.is_under_way
    before = [tensor.clone() for _, tensor in mine]
    averaging.start(weights[world.rank], 1 / sum(weights))
    assert averaging.is_under_way
    squared = averaging.finish()
    for (_, tensor), mean in zip(mine, expected, strict=True):
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-6)
    distance = sum(float((b - m).square().sum()) for b, m in zip(before, expected, strict=True))
    assert squared == pytest.approx(distance, rel=1e-4, abs=1e-9)
    bits = b"".join(t.contiguous().numpy().tobytes() for _, t in mine)
    assert len(set(world.allgather(bits))) == 1


@EVERY_SIZE
@pytest.mark.usefixtures("hvd_nodes")
def test_what_is_kept_and_what_arrives_later(world):
    own = torch.full((100,), float(world.rank))
    averaging = Averaging(current().comm, Identity(), Tensors(lambda: [("own", own)]), 1 << 20)
    averaging.start(1.0, 1.0 / world.size)
    travelled = averaging.own_state()
    own.fill_(10.0)
    averaging.finish(keep=0.25)
    mean = (world.size - 1) / 2
    torch.testing.assert_close(own, torch.full((100,), 2.5 + 0.75 * mean))
    assert averaging.own_state() is None
    own.fill_(20.0)
    averaging.load_own_state(travelled)
    averaging.finish()
    torch.testing.assert_close(own, torch.full((100,), mean))


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("hvd_nodes")
def test_the_error_of_sixteen_bits_is_that_of_the_change(world):
    base = torch.linspace(100.0, 101.0, 1000)
    own = base.clone()
    averaging = AnchoredAveraging(
        current().comm,
        HalfCodec(torch.bfloat16),
        Tensors(lambda: [("own", own)]),
        1 << 20,
        node=node_comm(),
    )
    own.add_(1e-3 * (world.rank + 1))
    averaging.start(1.0, 1.0 / world.size)
    averaging.finish()
    change = own - base
    expected = 1e-3 * (world.size + 1) / 2
    assert float((change - expected).abs().max()) < 1e-2 * expected + 1e-5  # of float32 near 100


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usefixtures("hvd_nodes")
def test_other_tensors_are_an_error_on_every_rank(world):
    own = torch.zeros(10 + world.rank)
    with pytest.raises(MismatchError, match="averaged tensors"):
        Averaging(current().comm, Identity(), Tensors(lambda: [("own", own)]), 1 << 20)


@EVERY_SIZE
@pytest.mark.usefixtures("hvd_nodes")
@pytest.mark.parametrize("numel", [1, 63, 64, 129, 1000])
def test_a_vector_of_a_node_is_written_in_slices_and_read_whole(numel):
    node = node_comm()
    vector = NodeVector(node, numel, torch.float64)
    vector.own.copy_(torch.arange(numel, dtype=torch.float64)[vector.bounds])
    node.barrier()
    out = torch.empty(numel, dtype=torch.float64)
    vector.read(out)
    assert torch.equal(out, torch.arange(numel, dtype=torch.float64))
