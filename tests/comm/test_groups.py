"""Groups: communicators of some ranks, in the order in which they are named."""

import pytest
import torch

from hpctrain.core.errors import CommError


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_group_sums_over_its_own_ranks_only(world, comm):
    ranks = list(range(world.size))[::-2]
    group = comm.group(ranks)
    assert (group is None) == (world.rank not in ranks)
    if group is not None:
        assert (group.rank, group.size) == (ranks.index(world.rank), len(ranks))
        tensor = torch.full((70_000,), float(world.rank))
        bucket = group.new_bucket(1000, torch.float32)
        bucket.flat.fill_(world.rank)
        group.allreduce_(tensor).wait()
        group.allreduce_(bucket).wait()
        assert bool((tensor == sum(ranks)).all())
        assert bool((bucket.flat == sum(ranks)).all())
        assert group.allgather_object(world.rank) == ranks
        group.close()
    comm.barrier()


@pytest.mark.ranks(3, 4)
def test_groups_that_overlap_work_one_after_the_other(world, comm):
    pairs = [(a, b) for a in range(world.size) for b in range(a + 1, world.size)]
    groups = {pair: comm.group(pair) for pair in pairs}
    for pair, group in groups.items():
        if group is not None:
            tensor = torch.full((300,), float(world.rank))
            group.allreduce_(tensor).wait()
            assert bool((tensor == sum(pair)).all())
    for group in groups.values():
        if group is not None:
            group.close()


@pytest.mark.ranks(3, 4)
def test_a_group_of_a_group_names_ranks_of_the_outer_one(world, comm):
    outer = comm.group([2, 1, 0])
    if outer is not None:
        inner = outer.group([0, 1])
        assert (inner is None) == (world.rank == 0)
        if inner is not None:
            assert inner.allgather_object(world.rank) == [2, 1]
            inner.close()
        outer.close()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 99], [-1]])
def test_a_group_needs_ranks_that_exist_each_once(comm, ranks):
    with pytest.raises(CommError, match="a group has one or more ranks from 0 to"):
        comm.group(ranks)
