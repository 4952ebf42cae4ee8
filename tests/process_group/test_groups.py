"""Process groups: subsets of ranks, concurrent groups, futures, order, errors and destruction."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import hpctrain
from hpctrain.core.errors import CommError, RankLostError
from tests.process_group.conftest import started

pytestmark = pytest.mark.ranks(2, 3)


def total(group=None, value=None):
    out = torch.tensor([float(dist.get_rank() if value is None else value)])
    dist.all_reduce(out, group=group)
    return out.item()


@pytest.mark.usefixtures("ours")
@pytest.mark.ranks(1, 2)
def test_init_process_group_needs_no_address():
    assert dist.get_backend() == "hpctrain"
    assert total(value=1) == dist.get_world_size() == hpctrain.size()
    assert dist.get_rank() == hpctrain.rank()


@pytest.mark.usefixtures("ours")
def test_other_backends_need_no_address(monkeypatch):
    dist.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("gloo")
    assert total(value=1) == dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("hpctrain")


@pytest.mark.usefixtures("ours")
def test_a_group_can_be_destroyed_and_created_again():
    for _ in range(3):
        group = dist.new_group(range(dist.get_world_size()))
        assert total(group, 1) == dist.get_world_size()
        dist.destroy_process_group(group)
        dist.destroy_process_group()
        dist.init_process_group("hpctrain")


@pytest.mark.usefixtures("ours")
def test_overlapping_groups_work_concurrently():
    me, size = dist.get_rank(), dist.get_world_size()
    shapes = [[0], list(range(size)), [size - 1, 0], list(range(1, size))]
    groups = [(ranks, dist.new_group(ranks)) for ranks in shapes]
    works = []
    for ranks, group in groups:
        if me in ranks:
            out = torch.full((3,), float(me))
            works.append((out, sum(ranks), dist.all_reduce(out, group=group, async_op=True)))
    for out, expected, work in reversed(works):
        work.wait()
        assert out.tolist() == [expected] * 3


@pytest.mark.usefixtures("ours")
def test_only_members_create_a_group():
    me, size = dist.get_rank(), dist.get_world_size()
    if me != size - 1 or size == 2:
        mine = [rank for rank in range(size) if rank != size - 1 or size == 2]
        group = dist.new_group(mine, use_local_synchronization=True)
        assert total(group) == sum(mine)
    half = size // 2
    split = dist.split_group(split_ranks=[list(range(half)), list(range(half, size))])
    assert dist.get_process_group_ranks(split) == [
        r for r in range(size) if (r < half) == (me < half)
    ]
    assert total(split, 1) == split.size()


@pytest.mark.usefixtures("ours")
def test_callbacks_of_futures_may_communicate():
    size, tensors = dist.get_world_size(), [torch.ones(1000), torch.ones(10)]

    def again(future):
        (found,) = future.value()
        work = dist.all_reduce(found, async_op=True)
        return work.get_future().then(lambda inner: [inner.wait()[0].mul_(2)]).wait()

    futures = [dist.all_reduce(t, async_op=True).get_future().then(again) for t in tensors]
    later = torch.ones(5)
    work = dist.all_reduce(later, async_op=True)
    for future, tensor in zip(futures, tensors, strict=True):
        assert future.wait()[0] is tensor
        assert tensor.eq(2 * size**2).all()
    work.wait()
    assert later.eq(size).all()


def test_an_error_in_backward_of_ddp_is_raised_by_backward():
    """DDP's C++ code takes an error stored in a future for the tensors of its value."""
    with started():
        wrapped = DistributedDataParallel(torch.nn.Linear(3, 1))
        dist.group.WORLD.abort()
        with pytest.raises(RuntimeError, match=r"GroupError: all_reduce, number .* was aborted"):
            wrapped(torch.ones(2, 3)).sum().backward()
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        with pytest.raises(RuntimeError, match="was aborted"):
            future.then(lambda inner: inner.value()[0]).wait()


@pytest.mark.usefixtures("ours")
def test_a_callback_may_wait_for_a_later_operation():
    size, gate = dist.get_world_size(), threading.Event()
    first, second = torch.ones(2), torch.ones(3)
    works = []

    def wait_for_second(_):
        if threading.current_thread() is threading.main_thread():
            # the first operation completed before then(), so the callback runs on the main thread
            return second
        gate.wait()
        works[0].wait()
        return second.clone()

    group = dist.new_group(range(size))
    future = dist.all_reduce(first, group=group, async_op=True).get_future().then(wait_for_second)
    works.append(dist.all_reduce(second, group=group, async_op=True))
    gate.set()
    found = future.wait()
    works[0].wait()
    assert found.eq(size).all()


@pytest.mark.usefixtures("ours")
def test_operations_are_executed_in_call_order():
    size, numbers = dist.get_world_size(), [torch.full((1,), float(k)) for k in range(50)]
    works = [dist.all_reduce(t, async_op=k % 3 > 0) for k, t in enumerate(numbers)]
    for work in works:
        assert work is None or work.wait()
    assert [t.item() for t in numbers] == [size * k for k in range(50)]


class Operations(TorchDispatchMode):
    """List the operations of torch on this thread, as selective recomputation does."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.mark.usefixtures("ours")
def test_a_mode_observes_the_same_operations_if_the_group_is_idle_or_busy():
    given, queue, found = torch.ones(dist.get_world_size()), dist.group.WORLD.queue, []
    for is_busy in (False, True):
        if is_busy:
            assert queue.begin()
            threading.Timer(0.1, queue.end).start()
        with Operations() as seen:
            dist.all_to_all_single(torch.empty_like(given), given)
        found.append(seen.names)
    assert found[0] == found[1]


def test_mismatched_calls_are_an_error_on_all_ranks():
    hpctrain.init()
    dist.init_process_group("hpctrain")
    with pytest.raises(CommError, match=r"all_reduce, number 1 of group 0 .*same calls"):
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    dist.destroy_process_group()
    hpctrain.shutdown()


def test_a_rank_that_misses_the_timeout_is_named(world, patience):
    with started():
        timeout = timedelta(seconds=patience(1.5))
        group = dist.new_group(range(dist.get_world_size()), timeout=timeout)
        if dist.get_rank() > 0:
            with pytest.raises(RankLostError, match=r"all_reduce, number 1 .*rank 0 did not call"):
                dist.all_reduce(torch.ones(3), group=group)
            with pytest.raises(RuntimeError, match="no longer in step"):
                dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
        world.Barrier()
        assert total(value=1) == dist.get_world_size()


def test_abort_ends_the_waits_of_a_group(world):
    with started():
        group = dist.new_group(range(dist.get_world_size()))
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            with pytest.raises(RuntimeError, match=r"is still in progress|must complete within"):
                work.wait(timedelta(seconds=0.1))
            group.abort()
            with pytest.raises(CommError, match="was aborted on this rank"):
                work.wait()
        world.Barrier()


@pytest.mark.parametrize("lost", ["first", "last"])
def test_a_monitored_barrier_names_the_missing_rank(world, lost):
    with started():
        dist.monitored_barrier()
        size, me = dist.get_world_size(), dist.get_rank()
        group, missing = dist.new_group(range(size)), 0 if lost == "first" else size - 1
        words = rf"monitored_barrier, number 1 .*timeout=0.5 .*rank {missing} did not call"
        of_gloo = (
            f"Rank {me} successfully reached monitoredBarrier"
            if me > 0
            else f"Rank 0 timed out in .* after 500 ms, Rank {missing} failed to pass monitored"
        )
        if me != missing:
            with pytest.raises(RuntimeError, match=f"{of_gloo}.*{words}"):
                dist.monitored_barrier(group, timedelta(seconds=0.5))
        world.Barrier()


@pytest.mark.usefixtures("ours")
def test_unsupported_calls_raise_an_error_with_an_alternative():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    hook = dist.BuiltinCommHookType.FP16_COMPRESS
    with pytest.raises(CommError, match="fp16_compress_hook"):
        model._register_builtin_comm_hook(hook)
    with pytest.raises(ValueError, match="split sizes"):
        dist.all_to_all_single(torch.zeros(1), torch.zeros(1), [1], [1, 1, 1, 1, 1])
