"""The sum over ranks: right, the same bits everywhere and every time, for all that is summable."""

import hashlib

import pytest
import torch

from hpctrain.comm.factory import connect
from hpctrain.comm.mpi_world import find_world
from hpctrain.comm.ops import Op
from hpctrain.core.config import Settings
from hpctrain.core.errors import CommError, MismatchError
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


@pytest.mark.ranks(1, 2, 3)
def test_an_operation_without_meaning_is_refused_by_name(comm):
    with pytest.raises(CommError, match="min needs values that have an order, got complex64"):
        comm.allreduce_(torch.ones(3, dtype=torch.complex64), op=Op.MIN)


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_sum_out_of_place_leaves_its_argument(world, comm):
    tensor = torch.full((4, 6), 1j * world.rank, dtype=torch.complex64)[:, ::2]
    result = comm.allreduce(tensor, scale=2.0)
    assert result.is_contiguous()
    assert torch.equal(result, torch.full((4, 3), 1j * world.size * (world.size - 1)))
    assert torch.equal(tensor, torch.full((4, 3), 1j * world.rank))


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_conjugate_view_and_a_parameter_are_summed(world, comm):
    plain = torch.full((3,), 1 + 2j)
    comm.allreduce_(plain.conj()).wait()
    assert torch.equal(plain, torch.full((3,), (1 + 2j) * world.size))
    parameter = torch.nn.Parameter(torch.ones(2))
    comm.allreduce_(parameter).wait()
    assert parameter.tolist() == [world.size] * 2


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "settings", [Settings(shared_memory="off"), Settings()], ids=("mpi", "node")
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [100, 3_000_000])
def test_ranks_that_disagree_about_a_sum_all_learn_it(world, settings, dtype, numel):
    connection = connect(find_world(), settings)
    last = world.rank == world.size - 1
    mine = torch.zeros(numel + last, dtype=torch.float32 if last else dtype)
    with pytest.raises(MismatchError, match="the same calls in the same order"):
        connection.comm.allreduce_(mine).wait()
    close(connection)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("numel", [10, 100_003])
def test_each_rank_gets_its_part_of_the_sum(world, comm, numel):
    mine = torch.arange(numel) + world.rank
    total = world.size * torch.arange(numel) + sum(range(world.size))
    part = comm.reduce_scatter(mine)
    before = [numel // world.size + (rank < numel % world.size) for rank in range(world.size)]
    start = sum(before[: world.rank])
    assert torch.equal(part, total[start : start + before[world.rank]])
    all_to_last = [0] * (world.size - 1) + [numel]
    part = comm.reduce_scatter(mine, op=Op.MAX, numels=all_to_last)
    assert torch.equal(part, (torch.arange(numel) + world.size - 1)[: part.numel()])
    assert part.numel() == all_to_last[world.rank]
    with pytest.raises(CommError, match=f"{numel} elements in all"):
        comm.reduce_scatter(mine, numels=[1] * world.size)


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


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inside_a_node_sixteen_bits_are_summed_in_float32_and_rounded_once(world, dtype):
    connection, numel = connect(find_world(), Settings()), 10_001
    every = [values_of(rank, numel, dtype) for rank in range(world.size)]
    expected, narrow = every[0].float(), every[0].clone()
    for values in every[1:]:
        expected.add_(values.float())
        narrow.add_(values)
    expected = expected.to(dtype)
    assert (narrow != expected).float().mean() > 0.05  # a sum in 16 bits would be seen
    bucket, tensor = connection.comm.new_bucket(numel, dtype), every[world.rank].clone()
    bucket.flat.copy_(tensor)
    for result, what in ((bucket.flat, bucket), (tensor, tensor)):
        connection.comm.allreduce_(what).wait()
        assert torch.equal(result, expected)
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
