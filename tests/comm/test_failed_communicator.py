"""Check that a communicator that failed on one rank gives correct results or errors on all."""

import time
from datetime import timedelta
from random import Random

import pytest
import torch
import torch.distributed as dist

from hpctrain.comm import blocks, waiting
from hpctrain.core.config import Settings
from hpctrain.core.errors import CommError, MismatchError, RankLostError
from tests.comm import failing
from tests.comm.conftest import connected
from tests.process_group.conftest import started

FIRST = {2: 300, 3: 1300, 4: 2300}
NUM_PROGRAMS = 4


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("number", range(NUM_PROGRAMS))
def test_calls_after_a_failure_return_their_own_result_or_raise(world, number):
    wrong, program = failing.check(FIRST[world.size] + number, world)
    assert not wrong, program


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seed", range(6))
def test_results_after_a_caught_mismatch_belong_to_the_same_call(world, comm, seed):
    """One rank leaves out or repeats a call; all ranks catch errors and continue."""
    random = Random(seed)
    odd, at, is_repeated = (
        random.randrange(world.size),
        random.randrange(11),
        random.random() < 0.5,
    )
    program = list(range(12))
    if world.rank == odd:
        program[at : at + 1] = [at, at] if is_repeated else []
    results = {}
    for number in program:
        value = torch.full((number + 1,), float(number))
        try:
            if number % 3 == 2:
                results[number] = comm.allgather_object(number)
            else:
                comm.allreduce_(value)
                results[number] = [float(value[0]) / world.size] * world.size
        except CommError:
            continue
    assert results == {number: [number] * world.size for number in range(at + is_repeated)}


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
def test_barrier_raises_on_a_late_rank_after_a_failure(world, per_node):
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
def test_member_that_timed_out_does_not_count_as_present(world):
    soon = timedelta(seconds=0.6)
    with started():
        size, is_last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
        start = time.monotonic()
        if is_last:  # the last rank calls alone, then the others call alone
            with pytest.raises(RankLostError, match="was not created"):
                dist.new_group(range(size), timeout=soon)
        world.Barrier()
        if not is_last:
            with pytest.raises(RankLostError, match="was not created"):
                dist.new_group(range(size), timeout=soon)
        world.Barrier()
        assert time.monotonic() - start < 60
        dist.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("per_node", [None, 1])
def test_new_world_is_not_confused_with_a_new_group(world, per_node):
    with started(per_node), failing.Signal(failing.AlarmError) as alarm:
        size, is_last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
        dist.new_group(range(size))  # the imports of torch for the first group take seconds
        world.Barrier()
        if is_last:
            with pytest.raises(failing.AlarmError):
                alarm.during(0.1, lambda: dist.new_group(range(size)))
        else:
            time.sleep(0.3)
            with pytest.raises(RankLostError, match=r"was not created.*waited"):
                dist.new_group(range(size), timeout=timedelta(seconds=0.5))
        dist.destroy_process_group()
        dist.init_process_group("hpctrain")
        out = torch.ones(3)
        dist.all_reduce(out)
        assert out.tolist() == [size] * 3
        dist.new_group(range(size))


@pytest.mark.ranks(2, 3)
def test_failed_group_can_be_destroyed_and_made_again(world):
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
def test_interrupted_call_after_a_pending_one_fails_both_on_all_ranks(world, per_node):
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


CALLS = {
    "sum of": lambda: dist.all_reduce(torch.ones(10)),
    "max of": lambda: dist.all_reduce(torch.ones(10), op=dist.ReduceOp.MAX),
    "sum of 5 float64": lambda: dist.all_reduce(torch.ones(5, dtype=torch.float64)),
    "barrier": dist.barrier,
    "scatter of": lambda: dist.scatter(torch.ones(2), *_parts(torch.ones(2))),
    "gather of": lambda: dist.gather(torch.ones(2), *_parts(torch.zeros(2))),
}


def _parts(one):
    return ([one] * dist.get_world_size() if dist.get_rank() == 0 else None), 0


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("one", "other", "by_node"),
    [
        *(("sum of", other, True) for other in ("max of", "sum of 5 float64", "barrier")),
        *(("sum of", other, False) for other in ("max of", "barrier")),
        *(("scatter of", "gather of", False), ("max of", "gather of", False)),
    ],
)
def test_different_calls_between_nodes_raise_on_all_ranks_with_both_names(
    world, monkeypatch, one, other, by_node
):
    monkeypatch.setattr(waiting, "COMPARE_S", 0.2)
    per_node = 1 if world.size == 2 else 2
    is_other = world.rank // per_node == 1 if by_node else world.rank == world.size - 1
    with started(per_node):
        with pytest.raises(CommError, match="same calls in the same order") as caught:
            CALLS[other if is_other else one]()
        assert one in str(caught.value)
        assert other in str(caught.value)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("per_node", [1, 2])
def test_a_rank_that_comes_after_different_calls_were_found_raises_that_error(
    world, monkeypatch, per_node
):
    monkeypatch.setattr(waiting, "COMPARE_S", 0.2)
    with connected(Settings(probe="off", ranks_per_node=per_node)) as made:
        is_late = world.rank == world.size - 1
        time.sleep(0.8 if is_late else 0)
        with pytest.raises(MismatchError, match=r"sum of 1 f.*on rank 0|rank 0: sum of 1 f"):
            made.comm.allreduce_(torch.ones(1 if world.rank == 0 or is_late else 2))


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("per_node", [1, 2])
def test_compared_calls_keep_ranks_in_step_however_late_a_rank_is(world, monkeypatch, per_node):
    monkeypatch.setattr(waiting, "COMPARE_S", 0.1)
    with connected(Settings(probe="off", ranks_per_node=per_node)) as made:
        is_last = world.rank == world.size - 1
        time.sleep(0.4 if is_last else 0)
        with pytest.raises(MismatchError, match="rank 1: broadcast of 1"):
            made.comm.broadcast_(torch.ones(1 if world.rank == 1 else 2), 0)
        made.comm.rejoin()
        time.sleep(0.4 if is_last else 0)
        total = torch.ones(3)
        made.comm.allreduce_(total)
        assert total.tolist() == [world.size] * 3


@pytest.mark.ranks(2, 3)
def test_error_that_ended_a_block_takes_precedence_over_later_different_calls(world, monkeypatch):
    monkeypatch.setattr(waiting, "COMPARE_S", 0.2)
    monkeypatch.setattr(blocks, "BREAK_S", 0.6)
    with connected(Settings(probe="off", ranks_per_node=1)) as made:
        comm, presence = made.comm, made.presence
        number, has_left = (
            presence.blocks.enter(blocks.Block("a test", lambda: 0)),
            world.rank == 1,
        )
        comm.barrier()
        if has_left:
            time.sleep(0.5)  # the others have reported their call
            presence.blocks.leave(number, ZeroDivisionError("no samples"))
        reason = "RankLostError" if has_left else "ZeroDivisionError: no samples"
        with pytest.raises(RankLostError, match=f"left a block of a test by {reason}") as caught:
            comm.allreduce_(torch.ones(1 + has_left))
        if not has_left:
            presence.blocks.leave(number, caught.value)
