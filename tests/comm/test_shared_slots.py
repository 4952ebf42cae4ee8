"""Check node memory: slots through which tensors are sent, and buckets that tensors keep alive."""

import ctypes
import gc
import random
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.bucket import ALIGN, TensorSpec, plan_buckets, slice_bounds
from hpctrain.comm.build import SLOT_BYTES
from hpctrain.comm.call_check import call_of
from hpctrain.comm.node.node_barrier import OVERSUBSCRIBED, NodeBarrier
from hpctrain.comm.node.segments import Semaphore
from hpctrain.comm.ops import Op
from hpctrain.comm.waiting import Watch
from hpctrain.core.config import Settings
from hpctrain.core.errors import CommError, MismatchError, NodeMemoryError, RankLostError
from tests.comm.conftest import connected
from tests.harness.pace import scaled

NUM_BARRIERS = 50
WAYS = ("direct", "slices", "bucket")
SLOT = SLOT_BYTES // 4


@pytest.fixture
def node():
    with connected(Settings(probe="off")) as made:
        yield made.comm


def allreduce_by(node, way, tensor, **options):
    if way != "bucket":
        node.allreduce_by(way, tensor, **options)
        return
    bucket = node.new_bucket(tensor.numel(), tensor.dtype)
    bucket.flat.copy_(tensor)
    node.allreduce_(bucket, **options)
    tensor.copy_(bucket.flat)


def values_of(rank, numel, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.ranks(2, 3, 4)
def test_values_are_added_in_rank_order_for_any_method_and_size(world, node):
    for numel in (0, 1, 65, SLOT, SLOT + 1, 3 * SLOT + 77):
        expected = values_of(0, numel)
        for rank in range(1, world.size):
            expected.add_(values_of(rank, numel))
        expected.mul_(0.5)
        for way in WAYS:
            tensor = values_of(world.rank, numel)
            allreduce_by(node, way, tensor, scale=0.5)
            assert torch.equal(tensor, expected), (way, numel)


@pytest.mark.ranks(2, 3, 4)
def test_halves_are_rounded_once(world, node):
    for dtype in (torch.float16, torch.bfloat16):
        total = sum(values_of(rank, 5000, dtype).float() for rank in range(world.size))
        for way in WAYS:
            tensor = values_of(world.rank, 5000, dtype)
            allreduce_by(node, way, tensor)
            assert torch.equal(tensor, total.to(dtype)), (way, dtype)


@pytest.mark.ranks(2, 3, 4)
def test_fast_rank_never_overwrites_values_that_a_slow_one_still_reads(world, node):
    for turn in range(200):
        tensor = torch.full((20_000,), float(world.rank + turn))
        node.allreduce_by(WAYS[turn % 3 == 0], tensor)
        if (turn + world.rank) % 7 == 0:
            time.sleep(0.001)
        expected = sum(range(world.size)) + world.size * turn
        assert bool((tensor == expected).all()), turn


@pytest.mark.ranks(2, 3, 4)
def test_fast_rank_does_not_overwrite_a_number_that_a_slow_one_still_compares(
    world, node, monkeypatch
):
    await_others = node.node.await_others

    def late(call, **how):
        await_others(call, **how)
        time.sleep(0.002 * (world.rank == 1))

    monkeypatch.setattr(node.node, "await_others", late)
    assert all(node.node.compare(call_of("comparison"), turn) for turn in range(20))


@pytest.mark.ranks(2, 3, 4)
def test_different_calls_raise_on_every_rank_with_the_calls_of_all_ranks(world, node):
    numel = 11 if world.rank == 1 else 10
    with pytest.raises(MismatchError, match=r"sum of 10 float32; rank 1: .*sum of 11 float32"):
        node.allreduce_(torch.ones(numel))
    node.rejoin()
    op = Op.MAX if world.rank == 0 else Op.SUM
    with pytest.raises(MismatchError, match=r"max of 5 int32; ranks? 1.*sum of 5 int32"):
        node.allreduce_(torch.ones(5, dtype=torch.int32), op=op)
    node.rejoin()
    total = torch.ones(3)
    node.allreduce_(total)
    assert bool((total == world.size).all())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_no_rank_passes_a_barrier_before_all_ranks_have_called_it(size):
    offset = 64
    num_bytes = offset + NodeBarrier.num_bytes(size)
    segments = [(ctypes.c_char * num_bytes)() for _ in range(size)]
    barriers = [NodeBarrier(segments, r, offset, Watch(), spin=False) for r in range(size)]
    counts, early = [0] * size, []

    def be(rank):
        chance = random.Random(rank)
        for number in range(1, NUM_BARRIERS + 1):
            time.sleep(chance.choice((0, 0, 0, 1e-3)))
            counts[rank] = number
            barriers[rank].wait()
            early.extend(count for count in counts if count < number)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [NUM_BARRIERS] * size
    assert early == []
    assert all(bytes(segment[:offset]) == bytes(offset) for segment in segments)


@pytest.mark.ranks(2, 4)
def test_wait_for_a_late_rank_of_the_node_sleeps(world, node):
    node.barrier()
    used_s, start = time.process_time(), time.monotonic()
    if world.rank == 0:
        time.sleep(2)
    node.allreduce_(torch.ones(100))
    waited_s = time.monotonic() - start
    assert world.rank == 0 or time.process_time() - used_s < scaled(0.2) * waited_s


@pytest.mark.ranks(2, 4)
def test_ranks_that_share_a_core_rarely_sleep_in_short_waits(world, node, monkeypatch):
    monkeypatch.setattr(node.node.waits, "pace", OVERSUBSCRIBED)
    naps, sleep = [], Semaphore.wait

    def noted(self, timeout_s):
        naps.append(timeout_s)
        return sleep(self, timeout_s)

    monkeypatch.setattr(Semaphore, "wait", noted)
    for _ in range(300):
        node.barrier()
    assert world.allreduce(len(naps)) < 150 * (world.size - 1)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("numel", [10, 3 * SLOT])
def test_sizes_beyond_the_first_piece_and_factors_are_compared(world, node, numel):
    last = world.rank == world.size - 1
    with pytest.raises(MismatchError, match="same calls in the same order"):
        node.allreduce_(torch.ones(SLOT + (numel if last else 0)))
    node.rejoin()
    with pytest.raises(MismatchError, match=r"times 2\.0.*times 0\.5"):
        node.allreduce_(torch.ones(numel), scale=0.5 if last else 2.0)
    node.rejoin()
    bucket = node.new_bucket(numel, torch.float32)
    with pytest.raises(MismatchError, match="max of bucket number 1"):
        node.allreduce_(bucket, op=Op.MAX if last else Op.SUM)


@pytest.mark.ranks(2, 3)
def test_new_buckets_must_be_equal_on_all_ranks(world, node):
    with pytest.raises(MismatchError, match="new bucket of 10 float32"):
        node.new_bucket(10 if world.rank == 0 else 1_000_000, torch.float32)
    node.rejoin()
    bucket = node.new_bucket(10, torch.float32)
    node.allreduce_(bucket)


@pytest.mark.ranks(2, 3)
def test_bucket_of_another_communicator_is_rejected(world, node):
    group = node.group(range(world.size))
    with pytest.raises(CommError, match="by the communicator that created it"):
        group.allreduce_(node.new_bucket(10, torch.float32))
    group.close()
    group.close()
    with pytest.raises(CommError, match="was closed"):
        group.allreduce_(torch.ones(3))


@pytest.mark.ranks(2)
def test_communicator_is_unusable_after_a_failed_wait(world, patience):
    with connected(Settings(probe="off", timeout=patience(1.0))) as made:
        if world.rank == 0:
            with pytest.raises(RankLostError, match="HPCTRAIN_TIMEOUT"):
                made.comm.allreduce_(torch.ones(3))
            with pytest.raises(CommError, match="no longer in step"):
                made.comm.allreduce_(torch.ones(3))
        world.Barrier()


@given(st.integers(0, 10**12), st.integers(1, 256))
def test_slices_cover_each_element_once_and_share_no_cache_line(numel, parts):
    bounds = [slice_bounds(numel, parts, part) for part in range(parts)]
    assert bounds[0].start == 0
    assert bounds[-1].stop == numel
    for left, right in pairwise(bounds):
        assert left.stop == right.start
        assert left.stop % ALIGN == 0 or left.stop == numel


@pytest.mark.ranks(2, 3, 4)
def test_bucket_lives_as_long_as_its_tensor(world):
    with connected(Settings(probe="off")) as connection:
        flat = connection.comm.new_bucket(50_000, torch.float32).flat
    del connection
    gc.collect()
    flat.fill_(world.rank)
    assert flat.sum().item() == 50_000 * world.rank


@pytest.mark.ranks(2, 3, 4)
def test_too_large_a_bucket_is_an_error_on_every_rank(node):
    with pytest.raises(NodeMemoryError, match=r"must have .* for the shared memory .* available"):
        node.new_bucket(1 << 48, torch.uint8)
    node.barrier()


@pytest.mark.ranks(2, 4)
def test_ranks_without_shared_memory_use_flat_mpi_and_report_it():
    with connected(Settings(shared_memory="off")) as connection:
        assert connection.plan.node_memory == "none"
        assert any("by flat MPI" in note for note in connection.notes)


@pytest.mark.ranks(2, 3, 4)
def test_buckets_need_no_descriptors(node):
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = [node.new_bucket(1000, torch.float32) for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(kept) == 20


DTYPES = st.sampled_from((torch.float32, torch.float64, torch.bfloat16))
SPECS = st.lists(
    st.builds(TensorSpec, name=st.just("t"), numel=st.integers(0, 5000), dtype=DTYPES), max_size=40
)
LIMITS = st.one_of(st.none(), st.integers(1, 20_000))


@given(SPECS, LIMITS, st.integers(0, 2))
def test_every_tensor_is_in_one_bucket_in_order_aligned_and_within_the_limit(specs, limit, marks):
    plans = plan_buckets(specs, limit, marks_per_tensor=marks)
    assert sorted(i for plan in plans for i in plan.members) == list(range(len(specs)))
    assert [plan.members[0] for plan in plans] == sorted(plan.members[0] for plan in plans)
    if limit is None:
        assert len(plans) == len({spec.dtype for spec in specs})
    for plan in plans:
        assert list(plan.members) == sorted(plan.members)
        end = 0
        for member, offset in zip(plan.members, plan.offsets, strict=True):
            assert specs[member].dtype == plan.dtype
            assert offset * plan.dtype.itemsize % 64 == 0
            assert offset >= end
            end = offset + specs[member].numel
        assert end + marks * len(plan.members) <= plan.numel
        assert limit is None or len(plan.members) == 1 or end * plan.dtype.itemsize <= limit


@given(SPECS, LIMITS, st.data())
def test_a_group_shares_one_bucket_per_dtype_and_complete_buckets_come_first(specs, limit, data):
    number = st.one_of(st.none(), st.integers(0, 3))
    groups = data.draw(st.lists(number, min_size=len(specs), max_size=len(specs)))
    plans = plan_buckets(specs, limit, groups=groups)
    assert sorted(i for plan in plans for i in plan.members) == list(range(len(specs)))
    found = [(plan.dtype, {groups[i] for i in plan.members}) for plan in plans]
    assert all(len(numbers) == 1 for _, numbers in found)
    grouped = [(dtype, min(numbers)) for dtype, numbers in found if numbers != {None}]
    assert len(set(grouped)) == len(grouped)
    last = [plan.members[-1] for plan in plans]
    assert last == sorted(last)
