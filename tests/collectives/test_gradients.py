"""Check gradients through operations, as Horovod defines them."""

import pytest
import torch

SIZES = pytest.mark.ranks(1, 2, 3, 4)


def leaf(*shape):
    return torch.ones(shape, dtype=torch.float64, requires_grad=True)


@SIZES
def test_allreduce_reduces_gradients_in_the_same_way(hvd):
    rank_mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    for op, factor in ((hvd.Average, 1), (hvd.Sum, hvd.size())):
        tensor, pair = leaf(2, 2), [leaf(3), leaf(1)]
        result = hvd.allreduce(tensor, op=op, prescale_factor=0.5, postscale_factor=4.0)
        (result * (1 + hvd.rank())).sum().backward()
        torch.testing.assert_close(tensor.grad, torch.full_like(tensor, 2 * factor * rank_mean))
        first, second = hvd.grouped_allreduce(pair, op=op)
        (first.sum() + 3 * second.sum()).backward()
        assert pair[0].grad.tolist() == [factor] * 3
        assert pair[1].grad.tolist() == [3 * factor]


@SIZES
def test_allgather_gives_each_rank_the_average_gradient_of_its_rows(hvd):
    rows = hvd.rank() + 1
    tensor, scalar = leaf(rows, 2), torch.ones((), requires_grad=True)
    weights = torch.arange(float(hvd.size() * (hvd.size() + 1) // 2)).double()
    gathered = hvd.allgather(tensor)
    (gathered * weights[:, None] * hvd.size()).sum().backward()
    start = hvd.rank() * rows // 2
    expected = weights[start : start + rows, None].expand(rows, 2) * hvd.size()
    torch.testing.assert_close(tensor.grad, expected)
    hvd.grouped_allgather([scalar, tensor])[0].sum().backward()
    assert scalar.grad.item() == pytest.approx(1.0)


@SIZES
def test_broadcast_gives_the_root_the_average_gradient(hvd):
    for root in range(hvd.size()):
        tensor = leaf(3)
        (hvd.broadcast(tensor, root) * (1 + hvd.rank())).sum().backward()
        mean = sum(range(1, hvd.size() + 1)) / hvd.size()
        expected = torch.full_like(tensor, mean if hvd.rank() == root else 0.0)
        torch.testing.assert_close(tensor.grad, expected)


@SIZES
def test_alltoall_sends_gradients_back(hvd):
    size, rank = hvd.size(), hvd.rank()
    tensor = leaf(size, 2)
    (hvd.alltoall(tensor) * (1 + rank)).sum().backward()
    assert tensor.grad.tolist() == [[1.0 + to] * 2 for to in range(size)]
    tensor = leaf(size + 1)  # the last row is not sent
    received, _ = hvd.alltoall(tensor, [1] * size)
    (received * (1 + rank)).sum().backward()
    assert tensor.grad.tolist() == [*(1.0 + to for to in range(size)), 0.0]


@SIZES
def test_reducescatter_gathers_gradients(hvd):
    size = hvd.size()
    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
        tensor, other = leaf(size + 1, 2), leaf(size)
        gradient = 2.0 * factor
        result = hvd.reducescatter(tensor, op=op, prescale_factor=0.5, postscale_factor=4.0)
        result.sum().backward()
        assert tensor.grad.tolist() == [[gradient] * 2] * (size + 1)
        tensor.grad = None
        hvd.grouped_reducescatter([tensor, other], op=op)[1].sum().backward()
        assert other.grad.tolist() == [factor] * size


@SIZES
def test_no_graph_is_recorded_without_gradients(hvd):
    tensor = leaf(2)
    assert not hvd.allreduce(torch.ones(2)).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(tensor).requires_grad
        assert not hvd.allgather(tensor).requires_grad
    assert hvd.allreduce(tensor).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(tensor)).requires_grad
    with torch.inference_mode():
        assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [hvd.size()] * 2
