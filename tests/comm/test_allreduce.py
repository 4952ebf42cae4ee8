"""The sum over ranks: right, the same bits everywhere and every time, for all that is summable."""

import hashlib

import pytest
import torch

from hpctrain.comm.factory import connect, find_world
from hpctrain.config import Settings
from hpctrain.errors import CommError
from tests.comm.conftest import close

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
SIZES = (0, 1, 63, 64, 1000, 70_001)
ROUNDING = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def values_of(rank, numel, dtype):
    source = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=source, dtype=torch.float64).to(dtype)
    return torch.randint(0, 127, (numel,), generator=source).to(dtype)


def exact_sum(size, numel, dtype):
    if dtype.is_floating_point:
        return sum(values_of(rank, numel, dtype).double() for rank in range(size))
    # Integers wrap around, as they do in torch and numpy; they never saturate.
    return sum(values_of(rank, numel, dtype).long() for rank in range(size)).to(dtype)


def assert_is_sum(result, size, numel):
    expected = exact_sum(size, numel, result.dtype)
    if result.dtype.is_floating_point:
        bound = ROUNDING[result.dtype] * max(1.0, *expected.abs().tolist()) if numel else 0.0
        assert (result.double() - expected).abs().max().item() <= bound if numel else True
    else:
        assert torch.equal(result, expected)


def assert_same_bits(world, tensor):
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert len(set(world.allgather(hashlib.sha256(raw).hexdigest()))) == 1


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce_is_the_sum_for_every_dtype_and_size(world, comm, dtype):
    for numel in SIZES:
        bucket, tensor = comm.new_bucket(numel, dtype), values_of(world.rank, numel, dtype)
        bucket.flat.copy_(tensor)
        for result, what in ((bucket.flat, bucket), (tensor, tensor)):
            comm.allreduce_(what).wait()
            assert_is_sum(result, world.size, numel)
            if numel:
                assert_same_bits(world, result)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("settings", [Settings(), Settings(ranks_per_node=2)], ids=("one", "two"))
def test_large_tensors_are_staged_through_node_memory(world, settings):
    connection = connect(find_world(), settings)
    numel = 5_000_003  # 20 MB: above the size from which tensors are staged, and no round number
    for dtype in (torch.float32, torch.int16):
        tensor = values_of(world.rank, numel, dtype)
        connection.comm.allreduce_(tensor).wait()
        assert_is_sum(tensor, world.size, numel)
        assert_same_bits(world, tensor)
    close(connection)


@pytest.mark.ranks(2, 3, 4)
def test_any_layout_is_summed_in_place(world, comm):
    whole = torch.zeros(6, 8)
    columns = whole[:, ::2]  # neither contiguous nor dense
    columns.copy_(torch.arange(24.0).view(6, 4) * (world.rank + 1))
    scalar = torch.tensor(float(world.rank))
    comm.allreduce_(columns).wait()
    comm.allreduce_(scalar).wait()
    factor = sum(range(1, world.size + 1))
    assert torch.equal(columns, torch.arange(24.0).view(6, 4) * factor)
    assert not whole[:, 1::2].any()
    assert scalar.item() == sum(range(world.size))


@pytest.mark.ranks(2, 3, 4)
def test_scale_multiplies_the_sum(world, comm):
    bucket = comm.new_bucket(70_001, torch.float32)
    bucket.flat.fill_(world.rank + 1.0)
    tensor = bucket.flat.clone()
    comm.allreduce_(bucket, scale=0.5).wait()
    comm.allreduce_(tensor, scale=0.5).wait()
    expected = 0.5 * sum(range(1, world.size + 1))
    assert bool((bucket.flat == expected).all())
    assert bool((tensor == expected).all())


@pytest.mark.ranks(2, 3, 4)
def test_integers_take_no_scale(comm):
    with pytest.raises(CommError, match="floating point"):
        comm.allreduce_(torch.ones(3, dtype=torch.int32), scale=0.5)


@pytest.mark.ranks(2, 3, 4)
def test_a_dtype_without_sums_is_refused_by_name(comm):
    with pytest.raises(CommError, match="got complex64"):
        comm.allreduce_(torch.ones(3, dtype=torch.complex64))


@pytest.mark.ranks(2, 3, 4)
def test_inside_a_node_ranks_are_added_in_rank_order(world):
    connection = connect(find_world(), Settings())
    bucket = connection.comm.new_bucket(10_001, torch.float32)
    bucket.flat.copy_(values_of(world.rank, 10_001, torch.float32))
    connection.comm.allreduce_(bucket).wait()
    expected = values_of(0, 10_001, torch.float32)
    for rank in range(1, world.size):
        expected.add_(values_of(rank, 10_001, torch.float32))
    assert torch.equal(bucket.flat, expected)
    close(connection)


@pytest.mark.ranks(2, 3, 4)
def test_the_same_plan_gives_the_same_bits_again(world, comm):
    bucket = comm.new_bucket(100_003, torch.float32)
    results = []
    for _ in range(3):
        bucket.flat.copy_(values_of(world.rank, 100_003, torch.float32))
        comm.allreduce_(bucket).wait()
        results.append(bucket.flat.clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.ranks(2)
def test_more_than_two_to_the_31_elements(world):
    connection = connect(find_world(), Settings())
    numel = (1 << 31) + 5
    tensor = torch.full((numel,), 100 + world.rank, dtype=torch.uint8)
    connection.comm.allreduce_(tensor).wait()
    ends = torch.cat((tensor[:100], tensor[-100:]))
    assert bool((ends == 201).all())
    assert int(tensor[:: 1 << 12].long().sum()) == 201 * len(range(0, numel, 1 << 12))
    close(connection)
