"""Check operations on rows: ``allgather``, ``alltoall``, ``reducescatter``, ``broadcast``."""

import pytest
import torch

from hpctrain.core.errors import ConfigError

SIZES = pytest.mark.ranks(1, 2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64, torch.uint16)


@SIZES
def test_allgather_puts_the_rows_of_all_ranks_one_after_the_other(hvd):
    ranks = range(hvd.size())
    for dtype in DTYPES:
        mine = torch.full((hvd.rank(), 2), hvd.rank()).to(dtype)  # rank 0 has none
        expected = torch.cat([torch.full((rank, 2), rank).to(dtype) for rank in ranks])
        assert torch.equal(hvd.allgather(mine), expected)
        both = hvd.grouped_allgather([mine, mine.view(-1)])
        assert torch.equal(both[1], expected.view(-1))
        assert torch.equal(hvd.synchronize(hvd.allgather_async(mine)), expected)
        assert torch.equal(hvd.synchronize(hvd.grouped_allgather_async([mine]))[0], expected)
    assert hvd.allgather(torch.tensor(hvd.rank())).tolist() == list(ranks)
    turned = torch.arange(4).view(2, 2).t()
    assert torch.equal(hvd.allgather(turned), turned.repeat(hvd.size(), 1))


@SIZES
def test_alltoall_sends_rows_to_every_rank(hvd):
    size, rank = hvd.size(), hvd.rank()
    even = hvd.alltoall(torch.arange(2 * size).view(2 * size, 1) + 100 * rank)
    expected = [[100 * other + 2 * rank + n] for other in range(size) for n in (0, 1)]
    assert even.tolist() == expected
    splits = torch.arange(size)  # as many rows as the receiver's rank, and one row stays local
    rows = torch.cat([torch.full((to,), to) for to in range(size)] + [torch.tensor([99])])
    for given in (splits, splits.int(), splits.tolist()):
        received, counts = hvd.alltoall(rows, given)
        assert received.tolist() == [rank] * rank * size
        assert counts.tolist() == [rank] * size
        assert counts.dtype is (given.dtype if isinstance(given, torch.Tensor) else torch.int32)
    received, counts = hvd.synchronize(hvd.alltoall_async(torch.arange(size)))
    assert (received.tolist(), counts.tolist()) == ([rank] * size, [1] * size)


@SIZES
def test_alltoall_rejects_invalid_splits(hvd):
    size = hvd.size()
    rows = torch.zeros(2 * size + 1)
    refused = [
        (
            lambda: hvd.alltoall(rows, [4] * size),
            f"sum to at most the number of rows.* {4 * size} in all",
        ),
        (lambda: hvd.alltoall(rows, [1] * (size + 1)), f"of {size} integers"),
        (lambda: hvd.alltoall(rows, [-1] * size), f"of {size} integers"),
        (lambda: hvd.alltoall(rows, torch.zeros(size)), f"of {size} integers"),
        (lambda: hvd.alltoall(torch.zeros(())), "got a tensor without dimensions"),
    ]
    if size > 1:
        refused.append((lambda: hvd.alltoall(rows), "pass the rows for each rank as splits"))
    for call, message in refused:
        with pytest.raises(ConfigError, match=message):
            call()


@SIZES
def test_reducescatter_gives_the_first_ranks_one_row_more(hvd):
    size, rank = hvd.size(), hvd.rank()
    for num_rows in (0, 1, size, 3 * size + 1):
        whole = torch.arange(2.0 * num_rows).view(num_rows, 2)
        counts = [num_rows // size + (r < num_rows % size) for r in range(size)]
        start = sum(counts[:rank])
        mine = whole[start : start + counts[rank]]
        assert torch.equal(hvd.reducescatter(whole, op=hvd.Sum), mine * size)
        assert torch.equal(hvd.synchronize(hvd.reducescatter_async(whole, op=hvd.Max)), mine)
        both = hvd.grouped_reducescatter([whole, whole.long()], op=hvd.Sum, prescale_factor=0.5)
        torch.testing.assert_close(both[0], mine * size / 2)
        assert torch.equal(both[1], (mine.long() * 0.5).long() * size)
        handle = hvd.grouped_reducescatter_async([whole], postscale_factor=4.0)
        torch.testing.assert_close(hvd.synchronize(handle)[0], mine * 4)
    with pytest.raises(ConfigError, match="reducescatter must have a first dimension"):
        hvd.grouped_reducescatter([torch.ones(3), torch.tensor(1.0)])


@SIZES
def test_broadcast_gives_all_the_tensor_of_the_root(hvd):
    for root in range(hvd.size()):
        for dtype in DTYPES:
            mine = torch.full((2, 3), hvd.rank() % 2).to(dtype)
            expected = torch.full((2, 3), root % 2).to(dtype)
            assert torch.equal(hvd.broadcast(mine, root), expected)
            assert torch.equal(mine, torch.full((2, 3), hvd.rank() % 2).to(dtype))
            assert torch.equal(hvd.synchronize(hvd.broadcast_async(mine, root)), expected)
            assert hvd.broadcast_(mine, root) is mine
            assert torch.equal(mine, expected)
        scalar, column = torch.tensor(hvd.rank()), torch.full((3, 2), hvd.rank())[:, 1]
        assert hvd.synchronize(hvd.broadcast_async_(scalar, root)) is scalar
        assert scalar.item() == root
        assert hvd.broadcast_(column, root).tolist() == [root] * 3
    with pytest.raises(ConfigError, match=f"of the process set, one of 0.*, got {hvd.size()}"):
        hvd.broadcast(torch.ones(1), hvd.size())


@SIZES
def test_sparse_tensors_are_reduced_like_dense_ones(hvd):
    dense = torch.zeros(5, 3)
    dense[hvd.rank()] = 1.0 + hvd.rank()
    dense[4, 2] = 6.0
    for op in (hvd.Sum, hvd.Average):
        handle = hvd.sparse_allreduce_async(dense.to_sparse(1), "embedding", op)
        expected = hvd.allreduce(dense, op=op)
        result = handle()
        assert result.layout is torch.sparse_coo
        torch.testing.assert_close(result.to_dense(), expected)
        assert hvd.poll(handle)
        torch.testing.assert_close(hvd.synchronize(handle).to_dense(), expected)
    for tensor, op, message in (
        (dense, hvd.Sum, r"layout torch.sparse_coo, got torch.strided; use allreduce"),
        (dense.to_sparse(), hvd.Max, "must be Average or Sum"),
        (dense.long().to_sparse(), hvd.Average, "complex to be averaged"),
    ):
        with pytest.raises(ConfigError, match=message):
            hvd.sparse_allreduce_async(tensor, "embedding", op)
