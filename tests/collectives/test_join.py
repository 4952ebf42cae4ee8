"""Check that ranks that have joined take part in all operations, with empty contributions."""

import pytest
import torch

from hpctrain.core.errors import HorovodInternalError


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.limit(30)
@pytest.mark.parametrize("first", [0, -1])
def test_every_operation_works_after_a_rank_has_joined(hvd, first):
    size, rank = hvd.size(), hvd.rank()
    first %= size
    if rank != first or size == 1:
        others = size - 1 if size > 1 else 1
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [others] * 2
        average = hvd.allreduce(torch.ones(2, dtype=torch.float64))
        assert average.tolist() == pytest.approx([others / size] * 2)
        assert hvd.allreduce(torch.tensor([7]), op=hvd.Min).item() == 7
        pair = hvd.grouped_allreduce([torch.tensor([7]), torch.tensor([0.5])], op=hvd.Product)
        assert [one.item() for one in pair] == [7**others, 0.5**others]
        assert hvd.allgather(torch.tensor([rank])).tolist() == [
            other for other in range(size) if other != first or size == 1
        ]
        rows, counts = hvd.alltoall(torch.arange(size), [1] * size)
        assert counts.tolist() == [int(other != first or size == 1) for other in range(size)]
        assert rows.tolist() == [rank] * others
        assert hvd.reducescatter(torch.ones(size), op=hvd.Sum).tolist() == [others]
        root = rank if size == 1 else (first + 1) % size
        assert hvd.broadcast(torch.tensor(rank), root).item() == root
        hvd.barrier()
        if size > 1:
            with pytest.raises(HorovodInternalError):
                hvd.broadcast(torch.tensor(rank), first, name="from a rank that has joined")
    last = hvd.join()
    assert last != first or size == 1
    assert hvd.allgather(torch.tensor(last)).tolist() == [last] * size


@pytest.mark.ranks(3, 4)
@pytest.mark.limit(30)
def test_ranks_that_have_joined_take_part_in_their_process_sets(hvd):
    size, rank = hvd.size(), hvd.rank()
    some = hvd.add_process_set(range(size - 1))
    for number in range(1 + rank if some.included() else 0):
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="some", process_set=some)
        assert total.item() == some.size() - number
    assert hvd.join() in range(size)
    if some.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=some).item() == some.size()
    hvd.remove_process_set(some)
