"""Process sets: ids, members, errors, and concurrent operations of several sets."""

import copy
import pickle

import pytest
import torch

import hpctrain
from hpctrain.core.errors import ConfigError, MismatchError, NotInitializedError
from hpctrain.runtime.process_sets import in_set
from hpctrain.runtime.world import current

SIZES = pytest.mark.ranks(1, 2, 3, 4)
SEVERAL = pytest.mark.ranks(2, 3, 4)


def halves(size):
    return list(range(0, size, 2)), list(range(1, size, 2))


@SIZES
def test_the_global_set_has_all_ranks_from_init_to_shutdown():
    everyone = hpctrain.global_process_set
    assert (everyone.process_set_id, everyone.ranks) == (0, [])
    with pytest.raises(NotInitializedError, match=r"hpctrain\.init"):
        everyone.size()
    for _ in range(2):
        hpctrain.init()
        assert everyone.ranks == list(range(hpctrain.size()))
        assert (everyone.rank(), everyone.size()) == (hpctrain.rank(), hpctrain.size())
        assert everyone.included()
        hpctrain.shutdown()
        assert everyone.ranks == []


@SEVERAL
def test_sets_passed_to_init_are_numbered_in_order_and_removed_at_shutdown(world):
    first, last = hpctrain.ProcessSet([0]), hpctrain.ProcessSet(reversed(range(1, world.size)))
    assert first.rank() is first.size() is first.process_set_id is None
    hpctrain.init(process_sets=[first, last])
    assert (first.process_set_id, last.process_set_id) == (1, 2)
    assert str(last) == (
        f"ProcessSet(process_set_id=2, ranks={list(range(1, world.size))}, mpi_comm=None)"
    )
    assert (first.size(), last.size()) == (1, world.size - 1)
    mine, other = (first, last) if world.rank == 0 else (last, first)
    assert mine.rank() == max(0, world.rank - 1)
    assert mine.included()
    assert not other.included()
    with pytest.raises(ConfigError, match=rf"rank {world.rank} is not in ProcessSet\(process_set"):
        other.rank()
    hpctrain.init(process_sets="dynamic")
    hpctrain.init(process_sets=[first])  # already registered
    twin = hpctrain.ProcessSet(range(world.size))
    with pytest.raises(ConfigError, match="but entry 0 has"):
        hpctrain.init(process_sets=[twin])
    assert twin.process_set_id is None
    assert hpctrain.size() == world.size
    hpctrain.shutdown()
    assert first.process_set_id is last.rank() is None


@SEVERAL
def test_sets_can_be_created_from_communicators(world):
    part = world.Split(world.rank % 2, world.rank)
    mine = hpctrain.ProcessSet(part)
    assert mine.ranks is mine.included() is None
    hpctrain.init(world, process_sets=[mine])
    even, odd = halves(world.size)
    assert current().sets.by_number() == {0: list(range(world.size)), 1: even, 2: odd}
    assert mine.ranks == (odd if world.rank % 2 else even)
    assert mine.mpi_comm is part
    assert hpctrain.global_process_set.mpi_comm is world
    twin = hpctrain.ProcessSet(part)
    with pytest.raises(ConfigError, match="but set 1 has"):
        hpctrain.add_process_set(twin)
    hpctrain.shutdown()
    hpctrain.init([world, part])
    assert current().sets.by_number() == {0: list(range(world.size)), 1: even, 2: odd}
    hpctrain.shutdown()
    part.Free()


@SEVERAL
def test_ids_of_removed_sets_are_reused(hvd):
    even, odd = halves(hvd.size())
    sets = [hvd.add_process_set(ranks) for ranks in (even, odd)]
    assert [one.process_set_id for one in sets] == [1, 2]
    with pytest.raises(ConfigError, match=r"but set 1 has \[0.*; use"):
        hvd.add_process_set(even)
    assert hvd.remove_process_set(sets[0])
    assert not hvd.remove_process_set(sets[0])
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert sets[0].process_set_id is None
    assert hvd.add_process_set(sets[0]).process_set_id == 1
    assert current().sets.by_number() == {0: list(range(hvd.size())), 1: even, 2: odd}


@SEVERAL
def test_operations_of_overlapping_sets_are_independent(hvd):
    even, odd = halves(hvd.size())
    rank, size = hvd.rank(), hvd.size()
    sets = [hvd.add_process_set(ranks) for ranks in (even, odd) if len(ranks) < size]
    if size > 2:
        sets.append(hvd.add_process_set(range(1, size)))
    sets.append(hvd.global_process_set)
    mine = [one for one in sets if one.included()]
    order = mine if rank % 2 else list(reversed(mine))  # a different order on every rank
    handles = {
        one.process_set_id: hvd.allreduce_async(
            torch.tensor([float(rank)]), op=hvd.Sum, name="x", process_set=one
        )
        for one in order
    }
    for one in mine:  # collectives of buckets use another communicator than named operations
        total = current().sets.communicator(one).allreduce(torch.ones(3))
        assert total.tolist() == [len(one.ranks)] * 3
    for one in mine:
        assert hvd.synchronize(handles[one.process_set_id]).item() == sum(one.ranks)
    assert current().sets.communicator(None) is current().comm


@SEVERAL
def test_removal_waits_for_operations_that_all_ranks_of_the_set_have_started(hvd):
    one = hvd.add_process_set([0])
    two = hvd.add_process_set(range(1, hvd.size()))
    mine = one if one.included() else two
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, process_set=mine)
    hvd.remove_process_set(one)
    hvd.remove_process_set(two)
    assert hvd.synchronize(handle).item() == len(mine.ranks)
    with pytest.raises(ConfigError, match="is not, or was removed"):
        hvd.allreduce(torch.ones(1), process_set=mine)


@SEVERAL
def test_different_sets_are_an_error_on_all_ranks_and_later_calls_work(hvd):
    rank = hvd.rank()
    with pytest.raises(MismatchError, match=r"rank 0: \[0\]; .*: \[1\]"):
        hvd.add_process_set([min(rank, 1)])
    one, two = (hvd.add_process_set([r]) for r in range(2))
    with pytest.raises(MismatchError, match=r"rank 0: set 1; .*: set 2"):
        hvd.remove_process_set(two if rank else one)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    assert current().sets.by_number().keys() == {0, 1, 2}


@SIZES
def test_invalid_sets_are_rejected_on_every_rank(hvd):
    size = hvd.size()
    for ranks in ([], [size], [0, 0], [-1]):
        with pytest.raises(ConfigError, match=rf"different ranks from 0 to {size - 1}, got"):
            hvd.add_process_set(ranks)
    for value in ([0.0], 3, ["0"]):
        with pytest.raises(ConfigError, match="list of ranks or an mpi4py communicator"):
            hvd.ProcessSet(value)
    with pytest.raises(ConfigError, match="'dynamic', got 'static'"):
        hvd.init(process_sets="static")


@pytest.mark.ranks(3)
@pytest.mark.usefixtures("hvd")
def test_a_set_of_several_ranks_needs_mpi_with_threads(monkeypatch):
    monkeypatch.setattr("hpctrain.runtime.process_set_table.calls_from_threads", lambda: False)
    with pytest.raises(ConfigError, match=r"without MPI_THREAD_MULTIPLE, so \[0, 1\]"):
        hpctrain.add_process_set([0, 1])
    hpctrain.add_process_set([0])  # a set of one rank does not communicate


@SEVERAL
def test_renewed_sets_keep_their_ids_and_work(hvd):
    one = hvd.add_process_set([0])
    hvd.allreduce(torch.ones(1), name="before")
    current().sets.break_off("the test says so")
    current().comm.barrier()
    with pytest.raises(hvd.HorovodInternalError, match="the test says so"):
        hvd.allreduce(torch.ones(1), name="between")
    current().comm.barrier()
    current().sets.renew()
    assert one.process_set_id == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@SIZES
def test_roots_are_ranks_of_the_world(hvd):
    last = hvd.size() - 1
    assert in_set(None, last) == in_set(hvd.global_process_set, last) == last
    with pytest.raises(ConfigError, match=f"root_rank .* got {last + 1}"):
        in_set(None, last + 1)
    if last:
        one = hvd.add_process_set([last])
        assert in_set(one, last) == 0
        with pytest.raises(ConfigError, match=f"one of {last}, got 0"):
            in_set(one, 0)


@pytest.mark.ranks(1)
def test_copies_are_the_same_object_and_pickles_contain_the_ranks():
    one = hpctrain.ProcessSet([0])
    for copied in (copy.copy(one), copy.deepcopy({"set": one})["set"]):
        assert copied is one
    assert pickle.loads(pickle.dumps(one)).ranks == [0]
    everyone = hpctrain.global_process_set
    assert pickle.loads(pickle.dumps(everyone)) is copy.deepcopy(everyone) is everyone
