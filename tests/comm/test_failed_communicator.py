"""A communicator that has failed on one rank fails on all: a right result, or an error."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hpctrain.core.config import Settings
from hpctrain.core.errors import CommError, RankLostError
from tests.comm import failing
from tests.comm.conftest import connected
from tests.process_group.conftest import started

FIRST = {2: 300, 3: 1300, 4: 2300}
NUM_PROGRAMS = 4


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("number", range(NUM_PROGRAMS))
def test_after_a_failure_each_call_gives_its_own_result_or_an_error(world, number):
    wrong, program = failing.check(FIRST[world.size] + number, world)
    assert not wrong, program


@pytest.mark.ranks(2)
@pytest.mark.parametrize("per_node", [None, 1])
@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_a_late_rank_does_not_get_data_of_the_next_call(world, per_node, shared_memory):
    settings = Settings(
        probe="off", timeout=0.4, ranks_per_node=per_node, shared_memory=shared_memory
    )
    with connected(settings) as made:
        world.Barrier()
        if world.rank == 0:
            with pytest.raises(RankLostError, match="HPCTRAIN_TIMEOUT"):
                made.comm.allreduce_(torch.ones(70_000))
            with pytest.raises(CommError, match="no longer in step"):
                made.comm.allreduce_(torch.full((70_000,), 10.0))
        world.Barrier()
        if world.rank == 1:
            with pytest.raises(RankLostError):
                made.comm.allreduce_(torch.ones(70_000))
            with pytest.raises(CommError, match="no longer in step"):
                made.comm.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("per_node", [None, 1])
def test_a_late_rank_hears_of_a_failure_at_a_barrier(world, per_node):
    with connected(Settings(probe="off", timeout=0.4, ranks_per_node=per_node)) as made:
        world.Barrier()
        if world.rank == 0:
            with pytest.raises(RankLostError):
                made.comm.barrier()
        world.Barrier()
        if world.rank == 1:
            with pytest.raises(RankLostError, match=r"failed on rank 0 .*no longer in step"):
                made.comm.barrier()


@pytest.mark.ranks(2, 3)
def test_a_member_that_has_given_up_does_not_count_as_present(world):
    soon = timedelta(seconds=0.6)
    with started():
        size, is_last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
        start = time.monotonic()
        if is_last:  # comes alone, then the others come alone
            with pytest.raises(RankLostError, match="was not made"):
                dist.new_group(range(size), timeout=soon)
        world.Barrier()
        if not is_last:
            with pytest.raises(RankLostError, match="was not made"):
                dist.new_group(range(size), timeout=soon)
        world.Barrier()
        assert time.monotonic() - start < 60
        dist.barrier()


@pytest.mark.ranks(2, 3)
def test_a_group_that_has_failed_can_be_destroyed_and_made_again(world):
    with started():
        ranks = range(dist.get_world_size())
        group = dist.new_group(ranks, timeout=timedelta(seconds=0.5))
        world.Barrier()
        if dist.get_rank() == 0:
            with pytest.raises(RankLostError):
                dist.all_reduce(torch.ones(3), group=group)
        world.Barrier()
        if dist.get_rank() > 0:
            with pytest.raises(RankLostError, match="failed on rank 0"):
                dist.all_reduce(torch.ones(3), group=group)
        world.Barrier()
        dist.destroy_process_group(group)
        again, out = dist.new_group(ranks), torch.ones(3)
        dist.all_reduce(out, group=again)
        assert out.tolist() == [dist.get_world_size()] * 3


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("per_node", [None, 1])
def test_an_interrupted_call_behind_a_pending_one_fails_both_on_all_ranks(world, per_node):
    with started(per_node), failing.Signal(failing.AlarmError) as alarm:
        pending, x = torch.ones(3), torch.full((4,), float(world.rank))
        world.Barrier()
        if world.rank == 1:
            work = dist.all_reduce(pending, async_op=True)
            with pytest.raises(failing.AlarmError):
                alarm.during(0.1, lambda: dist.broadcast(x, src=0))
            seen = pending.tolist(), x.tolist()
            world.Barrier()
            with pytest.raises(CommError, match="was interrupted"):
                work.wait()
        else:
            world.Barrier()
            work = dist.all_reduce(pending, async_op=True)
            with pytest.raises(CommError):
                work.wait()
            with pytest.raises(CommError, match="failed on rank 1"):
                dist.broadcast(x, src=0)
        with pytest.raises(CommError, match="no longer in step"):
            dist.all_reduce(torch.ones(2))
        world.Barrier()
        if world.rank == 1:
            assert (pending.tolist(), x.tolist()) == seen
